"""Stage target: HF layouts taken as they are or converted, a GGUF file from a wheel, and targets that are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import sha256_text
from scripts.lib.ground.manifest import Manifest, checked_shard, read_manifest
from scripts.lib.ground.stage import Job, run
from scripts.lib.targets import origins
from scripts.lib.targets.gguf_file import convert_gguf
from scripts.lib.targets.preparing import target
from tests.tiny import CHATML, SPECIAL, save_tiny_target, tiny_config, tiny_tokenizer
from tests.wheel import only_from, write_wheel

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target in HF layout."""
    return save_tiny_target(tmp_path_factory.mktemp("tiny"))


def built(folder: Path, **settings: Any) -> Manifest:
    """Run the stage and read back what it published under `folder`/target."""
    job = Job("target", folder / "target", {}, {"target": settings}, work=folder / "work")
    run(job, target)
    return read_manifest(job.output / "manifest.json", "target")


def cost(folder: Path) -> Any:
    """How the weights came there."""
    return json.loads((folder / "target" / "cost.json").read_text())["weights"]


def test_a_bf16_layout_is_taken_as_it_is(tmp_path: Path, tiny: Path) -> None:
    """Same bytes, and everything later stages ask of a target."""
    manifest = built(tmp_path, source=f"path:{tiny}")
    assert cost(tmp_path) in ("hard-linked", "copied")
    assert (tmp_path / "target/model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    told = json.loads((tmp_path / "target/target.json").read_text())
    expected = {
        "architecture": "LlamaForCausalLM",
        "num_layers": 8,
        "hidden_size": 64,
        "vocab_size": 272,
        "max_position_embeddings": 512,
        "tied": True,
        "eos_ids": [2],
        "chat_template_sha256": sha256_text(CHATML),
        "dtype": "bfloat16",
    }
    assert {key: told[key] for key in expected} == expected
    assert {key: manifest.facts[key] for key in expected} == expected
    assert set(told["files"]) == {shard.name for shard in manifest.shards} - {"target.json"}
    for shard in manifest.shards:
        checked_shard(tmp_path / "target", shard)


def test_other_dtypes_are_converted(tmp_path: Path, tiny: Path) -> None:
    """float32 weights come out as bf16, rounded once."""
    shutil.copytree(tiny, tmp_path / "float32")
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model.save_pretrained(tmp_path / "float32")
    built(tmp_path, source=f"path:{tmp_path / 'float32'}")
    assert cost(tmp_path) == "converted"
    before, after = load_file(tiny / "model.safetensors"), load_file(tmp_path / "target/model.safetensors")
    assert before.keys() == after.keys()
    assert all(after[name].dtype == torch.bfloat16 and torch.equal(before[name], after[name]) for name in before)


def test_targets_that_are_refused(tmp_path: Path, tiny: Path) -> None:
    """No template, no layout, quantised weights, nothing pinned: each is told with the remedy."""
    bare = shutil.copytree(tiny, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    quantised = shutil.copytree(tiny, tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    for settings, words in [
        ({"source": f"path:{bare}"}, "no chat template"),
        ({"source": f"path:{tmp_path}"}, "no config.json"),
        ({"source": f"path:{quantised}"}, "quantised"),
        ({"source": "hub:org/model"}, "revision None is not pinned"),
        ({"source": "hub:org/model", "revision": "main"}, "not pinned"),
        ({"source": "wheel:demo==1.0"}, "set target.member"),
        ({"source": "generator:demo==1.0"}, "write one of hub:…, path:…, wheel:…"),
    ]:
        with pytest.raises(StageError, match=words):
            built(tmp_path, **settings)


def test_hub_takes_the_pinned_snapshot(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Safetensors are enough; the revision is in the facts."""
    asked: list[dict[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        asked.append({"repository": repository, **options})
        return str(tiny)

    monkeypatch.setattr(origins, "snapshot_download", download)
    manifest = built(tmp_path, source="hub:org/model", revision=COMMIT)
    assert [(call["repository"], call["revision"]) for call in asked] == [("org/model", COMMIT)]
    assert manifest.facts["revision"] == COMMIT


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """Write a one-head Llama with the byte tokenizer as GGUF, weights in float16 as a converter does."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads or config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = [*tiny_tokenizer().convert_ids_to_tokens(list(range(259))), "ab", *(f"[pad{number}]" for number in range(12))]
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            data = tensor.float() if tensor.dim() == 1 else tensor.half()
            writer.add_tensor(str(names.get_name(name, try_suffixes=(".weight",))), data.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_member_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, tied embeddings, tokenizer, template and end-of-turn id survive the way through GGUF."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(layers=2)).bfloat16()
    write_gguf(tmp_path / "tiny.gguf", model)
    data = (tmp_path / "tiny.gguf").read_bytes()
    write_wheel(tmp_path / "links", "demo_model", "1.0", {"demo/tiny.gguf": data, "demo/notes.txt": b"x"})
    only_from(monkeypatch, tmp_path / "links")
    manifest = built(tmp_path, source="wheel:demo-model==1.0", member="*.gguf")
    assert (manifest.facts["member"], manifest.facts["num_layers"], manifest.facts["tied"]) == ("demo/tiny.gguf", 2, True)
    assert manifest.facts["eos_ids"] == [2]
    assert manifest.facts["chat_template_sha256"] == sha256_text(CHATML)
    weights = load_file(tmp_path / "target/model.safetensors")
    assert "lm_head.weight" not in weights
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        torch.testing.assert_close(weights[name], model.state_dict()[name], rtol=0, atol=1e-3)
    text = "Grüße <|im_end|>\n"
    assert AutoTokenizer.from_pretrained(tmp_path / "target")(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]
    assert gguf.GGUFReader.__name__ == "GGUFReader" and isinstance(gguf.GGUFReader, type)  # put back after the conversion
    with pytest.raises(StageError, match=r"takes demo/notes.txt; set target.member so that it takes one .gguf"):
        built(tmp_path, source="wheel:demo-model==1.0", member="*.txt")


def test_a_broken_gguf_file_is_told(tmp_path: Path) -> None:
    """The library's error becomes one sentence."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(StageError, match=r"bad.gguf: transformers .* cannot convert it"):
        convert_gguf(tmp_path / "bad.gguf", tmp_path)
