"""What merge says of the rows that it takes and leaves out: every line of the page adds up."""

from tests.chat_parts import asked, manifest_of, tokens
from tests.test_merge import LONG, reasons, rows, run


def test_the_mix_page_accounts_for_every_row(tmp_path):
    """Rows in = left out by each reason + train + held out, in every line; the last line is the sum of the others."""
    data = [
        *rows("A", 60),
        {"id": "long", "input_ids": list(range(20))},
        {"id": "known", "input_ids": [1, 1], "prompt_hash": "known"},
        {"id": "same", "input_ids": [1, 2], "asked": [LONG]},
    ]
    task = asked(tmp_path / "task", [{"id": "t", "asked": ["so what"], "prompt_hash": "known"}], "maths")
    other = [*rows("B", 20), {"id": "n", "input_ids": [1, 3], "asked": [LONG], "kind": "native"}]
    named = {"A": data, "B": other, "C": rows("C", 40)}
    manifests = [tokens(tmp_path / name, part, name) for name, part in named.items()]
    folder = run(tmp_path, manifests, [task], max_tokens=19, weights={"C": 0.5})
    lines = [line.strip("| ").split(" | ") for line in (folder / "mix.md").read_text().splitlines() if line.startswith("| ")]
    figures = [[int(cell.replace(",", "")) for cell in line[1:-1]] for line in lines[1:5]]
    assert [line[0] for line in lines[1:5]] == ["A", "B", "C", "all"]
    for rows_in, *left_out_or_taken, _, _ in figures:
        assert rows_in == sum(left_out_or_taken)
    assert figures[3] == [sum(column) for column in zip(*figures[:3], strict=True)]
    counts = manifest_of(folder)["counts"]
    assert (counts["rows_in"], counts["rows_out"]) == (figures[3][0], sum(figures[3][6:8]))
    assert set(counts["rejected"]) == {"too_long", "weight", "contaminated:maths", "duplicate"}
    assert all(len(value) <= 200 for _, value in reasons(folder).values())


def test_what_a_long_id_repeats_is_listed_shortened(tmp_path):
    twins = [{"id": name * 300, "input_ids": [1, 2, 3], "prompt_hash": "same"} for name in "zy"]
    folder = run(tmp_path, [tokens(tmp_path / "A", [*twins, *rows("A", 9)], "A")])
    ((reason, value),) = reasons(folder).values()
    assert (reason, len(value)) == ("duplicate", 200)
