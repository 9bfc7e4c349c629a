"""The doctor names each known misconfiguration before a server starts, and nothing in a sound run."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.doctor import main
from scripts.lib.doctor.command import Case, case_of, examine, table
from scripts.lib.doctor.findings import Finding, refuse
from scripts.lib.doctor.flags import parsed
from scripts.lib.doctor.preflight import preflight
from scripts.lib.doctor.repairs import REPAIRS
from scripts.lib.ground.errors import StageError
from tests.broken_drafters import BROKEN, Run, copied, edit_config, edit_weights, tiny_run

DOCS = Path(__file__).parents[1] / "docs/doctor.md"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("run"))


def names(run: Run, fatal: bool = True) -> list[str]:
    found = preflight(run.target, run.drafter, run.algorithm, run.flags)
    return sorted({finding.name for finding in found if finding.fatal is fatal})


def test_a_sound_run_has_no_finding(sound):
    assert preflight(sound.target, sound.drafter, sound.algorithm, sound.flags) == []


@pytest.mark.parametrize(("change", "name"), BROKEN.values(), ids=BROKEN.keys())
def test_each_silent_failure_is_named_before_a_server_starts(sound, tmp_path, change, name):
    """SGLang starts with every one of them, or stops without saying why; see `docs/doctor.md` for the public reports."""
    broken = change(copied(sound, tmp_path))
    assert names(broken) == [name]


def test_findings_stop_a_stage_with_evidence_and_repair(sound, tmp_path):
    broken = BROKEN["d2t of ids"][0](copied(sound, tmp_path))
    with pytest.raises(StageError, match=r"d2t_absolute: d2t holds target ids, .*, so store d2t as target id minus draft id"):
        refuse(preflight(broken.target, broken.drafter, "EAGLE3", broken.flags), str(broken.drafter))
    refuse([Finding("training_unknown", "no manifest", "nothing", fatal=False)], "a drafter")


def test_a_target_whose_files_moved_or_were_saved_anew_is_the_same(sound, tmp_path):
    moved = copied(sound, tmp_path)
    (moved.target / "manifest.json").unlink()
    path = moved.target / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert preflight(moved.target, moved.drafter, moved.algorithm, moved.flags) == []


def test_a_target_edited_where_it_lies_is_seen_although_its_manifest_is_that_of_the_training(tmp_path):
    run = tiny_run(tmp_path)
    path = run.target / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    assert names(run) == ["tokenizer_differs"]


def test_a_drafter_of_unknown_training_is_taken_with_a_note(sound, tmp_path):
    foreign = copied(sound, tmp_path)
    (foreign.drafter / "manifest.json").unlink()
    assert names(foreign) == []
    assert names(foreign, fatal=False) == ["training_unknown"]
    edit_config(
        foreign.drafter, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    )  # 8 layers: the usual ones, written as boundaries
    assert names(foreign, fatal=False) == ["layers_shifted", "training_unknown"]
    with pytest.raises(StageError, match="no manifest of stage train"):
        preflight(foreign.target, foreign.drafter, "EAGLE3", foreign.flags, foreign.target / "manifest.json")


def test_a_foreign_drafter_with_the_embedding_of_another_target_is_noted(sound, tmp_path):
    foreign = copied(sound, tmp_path)
    (foreign.drafter / "manifest.json").unlink()
    embedding = load_file(sound.target / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(foreign.drafter, lambda t: t | {"embed_tokens.weight": embedding.clone()})
    assert names(foreign, fatal=False) == ["training_unknown"]
    edit_weights(foreign.drafter, lambda t: t | {"embed_tokens.weight": embedding.roll(1, 0)})
    assert names(foreign, fatal=False) == ["embedding_differs", "training_unknown"]


def test_the_best_weights_of_a_training_are_of_that_training(sound, tmp_path):
    run = tiny_run(tmp_path)
    best = run.drafter / "best"
    best.mkdir()
    for name in ("config.json", "model.safetensors"):
        (best / name).write_bytes((run.drafter / name).read_bytes())
    assert preflight(run.target, best, None, []) == []
    edit_config(best, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 3]})
    assert [finding.name for finding in preflight(run.target, best, None, [])] == ["layers_shifted"]


@pytest.mark.parametrize(
    ("flags", "algorithm", "name"),
    [
        ("--speculative-algorithm EAGLE3 --speculative-draft-model-path D --speculative-eagle-topk 4", "EAGLE3", "steps_unset"),
        (
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path D --speculative-num-steps 2 --speculative-eagle-topk 2 "
            "--speculative-num-draft-tokens 8",
            "EAGLE3",
            "tree_too_small",
        ),
        ("--speculative-algorithm NGRAM --speculative-draft-model-path D", "NGRAM", "drafter_unused"),
        ("--speculative-algorithm NGRAM --speculative-accept-threshold-single=0.5", "NGRAM", "thresholds_lowered"),
        ("--speculative-algorithm NGRAM", "EAGLE3", "other_algorithm"),
        ("--speculative-num-steps 3", None, "no_speculation"),
    ],
)
def test_command_lines_that_sglang_rewrites_or_misreads_are_named(sound, flags, algorithm, name):
    assert [finding.name for finding in preflight(sound.target, None, algorithm, flags.split()) if finding.fatal] == [name]


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--quantization fp8", "drafter_quantized"),
        ("--kv-cache-dtype fp8_e5m2", "states_rounded"),
        ("--speculative-draft-window-size 512", "window_cut"),
        ("--speculative-token-map map.pt", "flag_unread"),
    ],
)
def test_flags_that_change_what_the_drafter_sees_are_noted(sound, flags, name):
    found = preflight(sound.target, sound.drafter, sound.algorithm, [*sound.flags, *flags.split()])
    assert [(finding.name, finding.fatal) for finding in found] == [(name, False)]


def test_an_invented_accept_length_is_named(sound, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3.5")
    assert names(sound) == ["accept_length_simulated"]


def test_flags_mend_what_they_can(sound, tmp_path):
    run = copied(sound, tmp_path)
    edit_config(run.drafter, torch_dtype="float32", max_position_embeddings=256)
    assert names(run) == ["dtype_differs", "positions_short"]
    assert names(replace(run, flags=(*run.flags, "--dtype", "bfloat16", "--context-length", "256"))) == []


def test_the_plain_target_and_other_algorithms_need_no_drafter(sound):
    assert preflight(sound.target, None, None, ["--dtype", "float16"]) == []
    assert preflight(sound.target, None, "NGRAM", ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "12"]) == []


def test_a_standalone_drafter_must_write_the_targets_ids(sound, tmp_path):
    flags = [
        "--speculative-algorithm",
        "STANDALONE",
        "--speculative-num-steps",
        "3",
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        "4",
    ]
    small = copied(sound, tmp_path).target
    flags += ["--speculative-draft-model-path", str(small)]
    assert preflight(sound.target, small, "STANDALONE", flags) == []
    BROKEN["another tokenizer"][0](Run(small, small, "STANDALONE", ()))
    assert [finding.name for finding in preflight(sound.target, small, "STANDALONE", flags)] == ["tokenizer_differs"]
    flags[1] = "EAGLE3"
    assert "other_algorithm" in [finding.name for finding in preflight(sound.target, small, "EAGLE3", flags)]


def test_a_command_line_is_read_as_sglang_reads_it():
    words = [
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "M",
        "--speculative-draft-model=D",
        "--tp",
        "2",
        "--disable-cuda-graph",
        "--tp=4",
    ]
    assert parsed(words) == {"model-path": "M", "speculative-draft-model-path": "D", "tp": "4", "disable-cuda-graph": ""}


def test_a_servers_command_line_says_what_to_look_at(sound):
    target, drafter, algorithm, flags = case_of(
        None, None, ["python", "-m", "sglang.launch_server", *sound.with_flag("speculative-algorithm", "EAGLE").flags]
    )
    assert (target, drafter, algorithm) == (sound.target, sound.drafter, "EAGLE3")
    found = examine(Case(target, drafter, algorithm, flags))
    assert [finding.name for finding in found] == ["eagle_for_eagle3"]
    assert "repair    serve it with --speculative-algorithm EAGLE3" in table(found)
    with pytest.raises(StageError, match="no target"):
        case_of(None, sound.drafter, [])


def test_a_check_without_a_command_line_takes_the_usual_one(sound):
    case = Case(*case_of(sound.target, sound.drafter, [])[:3], [])
    assert examine(case) == []
    assert table([]) == "sound: no known misconfiguration"


def test_the_command_prints_what_is_wrong_and_fails_only_then(sound, monkeypatch, capsys):
    words = ["--target", str(sound.target), "--drafter", str(sound.drafter)]
    monkeypatch.setattr("sys.argv", ["doctor", *words])
    main()
    assert capsys.readouterr().out == "sound: no known misconfiguration\n"
    monkeypatch.setattr("sys.argv", ["doctor", *words, "--", *sound.with_flag("speculative-num-draft-tokens", "16").flags])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert capsys.readouterr().out == (
        "FATAL  steps_rewritten\n    evidence  16 draft tokens with 3 steps at top-k 1: SGLang takes 4\n"
        "    repair    give the numbers that the server will use\n"
    )


def test_absolute_ids_are_told_without_a_mask_too(sound, tmp_path):
    run = BROKEN["d2t of ids"][0](copied(sound, tmp_path))
    path = run.drafter / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"] = torch.tensor([0, 2, 3, 7, 9, 270])
    save_file({name: tensor for name, tensor in tensors.items() if name != "t2d"}, path)
    assert names(run) == ["d2t_absolute"]


def test_the_documentation_holds_every_name():
    told = set(re.findall(r"^\| `(\w+)` \|", DOCS.read_text(), re.MULTILINE))
    assert told == set(REPAIRS)
