"""Text for calibration, as people have it: every public shape is read as its author meant, and nothing is lost without a word."""

import bz2
import gzip
import html
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest

from calibration import run
from calibration.fitting.advice import next_data
from calibration.fitting.statistics import Statistics
from calibration.text import encodings
from calibration.text.data import DATA
from calibration.text.enough import ENOUGH
from calibration.text.rows import Report
from calibration.text.sample import Sample, Sampling, draw
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.models import load_model
from qkv.scales import ScaleFile

U, A = "What is the rate on my loan?", "It is four percent a year."
USER, ASSISTANT, NO = ({"role": r, "content": c} for r, c in (("user", U), ("assistant", A), ("assistant", "no")))
READ = f"user: {U} | assistant: {A}"
RATE = {"name": "rate", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "rate", "arguments": {"id": 5}}\n</tool_call>'
CALLED = f"user: {U} | assistant: {CALL} | tool: 4 | assistant: {A}"
TOOLS = f"Tools:\n{json.dumps(RATE)}"


class Template:
    """A chat template that knows roles and texts only, as most small models' do, and wants both of every message."""

    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool, tools: Any = None) -> str:
        return " | ".join(m["role"] + ": " + m["content"] for m in messages)


class ToolTemplate(Template):
    """One that shows tool calls and definitions in a form of its own."""

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool, tools: Any = None) -> str:
        shown = [f"tools: {[t.get('function', t)['name'] for t in tools]}"] if tools else []
        for m in messages:
            functions = [c["function"] for c in m.get("tool_calls", [])]
            calls = [f"{f['name']}({','.join(map(str, f['arguments'].values()))})" for f in functions]
            shown.append(f"{m['role']}: {m['content'] or ','.join(calls)}")
        return " | ".join(shown)


class Alternating(Template):
    """One that refuses everything but user and assistant in turn."""

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool, tools: Any = None) -> str:
        if [m["role"] for m in messages] != [("user", "assistant")[i % 2] for i in range(len(messages))]:
            raise ValueError("Conversation roles must alternate user/assistant/user/assistant/...")
        return super().apply_chat_template(messages, tokenize)


def rows(folder: Path, *given: Any) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in given) + "\n", encoding="utf-8")
    return file


def read(path: Path | str, name: str = "jsonl", tokenizer: Any = None, **settings: Any) -> tuple[list[str], Report]:
    report = Report()
    return DATA.build({"name": name, "path": str(path), **settings}).documents(tokenizer, report), report


def parts(*content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]


def table(name: str) -> list[Any]:
    """The lines of a file beside this one, as parameters of a test, each under its own name."""
    lines = (Path(__file__).parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [pytest.param(*list(case.values())[1:], id=next(iter(case.values()))) for case in map(json.loads, lines)]


@pytest.mark.parametrize(("row", "right"), table("shapes"))
def test_a_public_shape_is_read_as_its_author_meant(row: Any, right: str, tmp_path: Path) -> None:
    texts, report = read(rows(tmp_path, row), tokenizer=Template())
    assert texts == [right], report.line()


def test_what_is_dropped_is_counted_by_reason(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    file = rows(
        tmp_path,
        {"messages": [{"role": "user", "content": parts(U, image, image)}, ASSISTANT]},
        {
            "messages": [
                {"role": "user", "content": parts({"type": "input_audio", "input_audio": {"data": "x"}})},
                NO,
                {"role": "user", "content": ""},
            ]
        },
        {"prompt": U, "chosen": "Yes.", "rejected": "no"},
        {"id": "7f1c9e52-3b1a-4c60-9a54-0d1f6f0c2b77"},
        {"prompt": None, "chosen": ""},
    )
    texts, report = read(file, tokenizer=Template())
    assert texts == [READ, "assistant: no", f"user: {U} | assistant: Yes."]
    assert +report.dropped == {"images": 2, "audio parts": 1, "empty turns": 2, "rejected answers": 1}
    assert report.skipped == {"empty or null": 2}
    assert report.shapes == {"messages": 2, "prompt, chosen": 1}
    line = report.line()
    assert "3 of 5 rows used; skipped: 2 empty or null; dropped: " in line
    assert "2 images" in line
    assert "also there: rejected" in line


def test_a_template_that_shows_tools_gets_them_as_they_are(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "rate", "arguments": '{"id": 5}'}}]}
    row = {"messages": [USER, called, {"role": "tool", "content": "4"}], "tools": [{"type": "function", "function": RATE}]}
    assert read(rows(tmp_path, row), tokenizer=ToolTemplate())[0] == [
        f"tools: ['rate'] | user: {U} | assistant: rate(5) | tool: 4"
    ]


def test_a_template_that_wants_turns_in_alternation_gets_them(tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "system", "content": "S"},
            USER,
            {"role": "user", "content": "Please."},
            ASSISTANT,
            {"role": "tool", "content": "4"},
        ]
    }
    texts, report = read(rows(tmp_path, row), tokenizer=Alternating())
    assert texts == [f"user: S\n\n{U}\n\nPlease. | assistant: {A} | user: 4"]
    assert report.repaired == {"conversations with turns merged for the chat template": 1}


def test_posts_that_answer_each_other_become_conversations(tmp_path: Path) -> None:
    """OpenAssistant's rows: one a post, with the id of the one before; of several answers the best is taken."""
    posts = [
        ("1", None, "prompter", U, None),
        ("2", "1", "assistant", "no", 1),
        ("3", "1", "assistant", A, 0),
        ("4", "3", "prompter", "And then?", 0),
    ]
    posts += [("5", None, "prompter", "Hello?", None)]
    file = rows(tmp_path, *({"message_id": i, "parent_id": p, "role": r, "text": t, "rank": k} for i, p, r, t, k in posts))
    texts, report = read(file, tokenizer=Template())
    assert texts == [f"{READ} | user: And then?", "user: Hello?"]
    assert +report.dropped == {"answers beside the best one": 1}


def test_ids_urls_hashes_dates_and_labels_are_not_text(tmp_path: Path) -> None:
    cells = {
        "content": lambda i: f"https://bank.example/loans/{i}",
        "sha": lambda i: f"{i:040x}",
        "when": lambda i: f"2024-01-{i + 1:02d} 10:00:00",
        "topic": lambda i: ("loans", "cards")[i % 2],
        "verdict": lambda i: ("not helpful at all", "very helpful indeed")[i % 2],
        "remark": lambda i: f"Customer {i} wants a loan.",
    }
    file = rows(tmp_path, *({name: cell(i) for name, cell in cells.items()} for i in range(20)))
    texts, report = read(file)
    assert texts == [f"Customer {i} wants a loan." for i in range(20)]
    assert "text taken from: remark (also there: " in report.line()
    assert "sha (ids, URLs, numbers or dates)" in report.line()
    assert "verdict (labels)" in report.line()
    assert read(file, field="content")[0][3] == "https://bank.example/loans/3", "what somebody names is text"
    texts, report = read(
        rows(tmp_path, {"text": "A text."}, {"text": "More."}, {"text": "https://a.b/c"}, {"text": "2024-01-05"})
    )
    assert texts == ["A text.", "More."]
    assert report.skipped == {"only an id, a URL, a number or a date": 2}
    (tmp_path / "rows.jsonl").write_text('{"id": "ab12cd34ef", "url": "https://a.b"}\n')
    with pytest.raises(ConfigError, match="1 with nothing but ids, URLs, numbers, dates or labels"):
        read(file)


def test_named_columns_are_the_users_turn_and_the_last_one_the_answer(tmp_path: Path) -> None:
    file = rows(tmp_path, {"instruction": "Translate", "input": "Guten Tag", "output": "Good day", "meta": {"note": "A note."}})
    columns = ["instruction", "input", "output"]
    assert read(file, tokenizer=Template(), field=columns)[0] == ["user: Translate\n\nGuten Tag | assistant: Good day"]
    assert read(file, tokenizer=Template(), field="meta.note")[0] == ["A note."]
    with pytest.raises(ConfigError, match=r"'outptu' is not in the data; its columns are: instruction, input, output, meta"):
        read(file, field=["instruction", "outptu"])


@pytest.mark.parametrize(("value", "right"), table("documents"))
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_document_is_read_by_rows_by_columns_or_by_the_list_in_it(
    value: Any, right: list[str], indent: int | None, tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(value, indent=indent), encoding="utf-8")
    assert read(file, "json", Template())[0] == right
    if isinstance(value, list) or indent:
        assert read(file, "jsonl", Template())[0] == right, "a document is seen to be one"


def test_lines_under_the_name_of_a_document_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"text": "One."}\n{"text": "Tw\n{"text": "Three."}\n')
    texts, report = read(file, "json")
    assert texts == ["One.", "Three."]
    assert report.skipped == {"not JSON": 1}


@pytest.mark.parametrize("name", ["csv", "tsv", "semicolons"])
def test_tables_are_read_by_their_separator(name: str, tmp_path: Path) -> None:
    separator, suffix = {"csv": (",", "csv"), "tsv": ("\t", "tsv"), "semicolons": (";", "csv")}[name]
    lines = [
        ["id", "question", "answer"],
        ["1", U.replace(",", ""), A],
        ["2", '"Why;\n so, though?"' if separator != "\t" else "Why?", "So."],
    ]
    file = tmp_path / f"a.{suffix}"
    file.write_text("\n".join(separator.join(line) for line in lines), encoding="utf-8-sig")
    texts, _ = read(file, "csv", Template())
    assert texts[0] == READ
    assert texts[1].endswith("| assistant: So.")


def test_parquet_and_arrow_keep_nested_cells_and_ignore_pictures(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    table = pyarrow.Table.from_pylist(
        [
            {
                "messages": [USER, {"role": "assistant", "content": A, "tool_calls": None}],
                "image": {"bytes": b"\x89PNG", "path": None},
            }
        ]
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    feather.write_feather(table, tmp_path / "b.arrow", compression="uncompressed")
    for name in ("a.parquet", "b.arrow"):
        assert read(tmp_path / name, "parquet", Template())[0] == [READ]


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
def test_compressed_files_are_read(suffix: str, tmp_path: Path) -> None:
    data = b'{"text": "One."}\n{"text": "Two."}\n'
    file = tmp_path / f"a.jsonl.{suffix}"
    if suffix == "zst":
        pyarrow = pytest.importorskip("pyarrow")
        file.write_bytes(pyarrow.compress(data, "zstd", asbytes=True))
    else:
        file.write_bytes({"gz": gzip, "bz2": bz2, "xz": lzma}[suffix].compress(data))
    assert read(file)[0] == ["One.", "Two."]
    assert read(tmp_path)[0] == ["One.", "Two."], "in a folder too"


def test_a_compressed_file_that_ends_too_early_gives_what_it_has(tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "Line %d of many."}\n' % i for i in range(20000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-200])
    texts, report = read(tmp_path / "a.jsonl.gz")
    assert len(texts) > 1000
    assert report.skipped["unreadable file, or the rest of one"] == 1


def test_folders_patterns_and_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "deep/er/b.md", "c.pdf", ".git/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"Text of {name}.")
    texts, report = read(tmp_path, "text")
    assert texts == ["Text of a.txt.", "Text of deep/er/b.md."]
    assert report.skipped == {"file of another kind": 1}
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/a.txt", "text")[0] == read(tmp_path / "*.txt", "text")[0] == ["Text of a.txt."]
    assert read("~/**/*.md", "text")[0] == ["Text of deep/er/b.md."]
    with pytest.raises(ConfigError, match=r"data.path: '~/\*.html' does not exist; give a file, a folder or a pattern that does"):
        read("~/*.html", "text")
    with pytest.raises(ConfigError, match=r"has no JSON lines \(.jsonl, .ndjson, .json\)"):
        read(tmp_path)


def test_a_file_of_another_kind_is_named_with_the_option_that_reads_it(tmp_path: Path) -> None:
    for name, wrong, right in (("a.jsonl", "text", "jsonl"), ("a.csv", "jsonl", "csv"), ("a.parquet", "csv", "parquet")):
        (tmp_path / name).write_text("x")
        with pytest.raises(ConfigError, match=rf"is not .* by its name; read it with data={right}"):
            read(tmp_path / name, wrong)


CHINESE = "北京的秋天天高云淡，香山的红叶最有名，适合登山和散步。"
ENCODED = {
    "gb18030": CHINESE,
    "big5": "銀行明天早上九點開門，利率是百分之四。",
    "euc_kr": "은행은 내일 아침 아홉 시에 문을 엽니다.",
    "shift_jis": "銀行は明日の朝九時に開きます。",
    "euc_jp": "銀行は明日の朝九時に開きます。",
    "cp1251": "Банк откроется завтра в девять утра.",
    "koi8_r": "Банк откроется завтра в девять утра.",
    "cp866": "Банк откроется завтра в девять утра.",
    "cp1250": "Banka otevře zítra v devět hodin, úroková sazba je čtyři procenta ročně.",
    "iso8859_2": "Zażółć gęślą jaźń, kredyt hipoteczny wymaga zgody.",
    "cp1252": "Die Bank öffnet morgen um neun, “größere” Beträge nur nach Anmeldung – 5 €.",
    "latin-1": "Le crédit à taux fixe coûte 4 % par an, sauf après révision.",
    "cp1253": "Η τράπεζα ανοίγει αύριο στις εννέα.",
    "cp1254": "Banka yarın sabah dokuzda açılıyor, faiz oranı yüzde dörttür.",
    "cp1255": "הבנק ייפתח מחר בתשע בבוקר, והריבית על ההלוואה היא ארבעה אחוזים לשנה.",
    "cp1256": "سيفتح البنك غدا في التاسعة صباحا",
    "utf-16": "The bank opens at nine tomorrow.",
    "utf-16-le": "The bank opens at nine tomorrow.",
    "utf-16-be": "Банк откроется завтра в девять утра.",
    "utf-32": CHINESE,
    "utf-8-sig": CHINESE,
}


@pytest.mark.parametrize("encoding", ENCODED)
def test_the_encoding_of_a_file_is_told_from_its_bytes(encoding: str, tmp_path: Path) -> None:
    text = ENCODED[encoding]
    contents = {"text": text, "csv": f'id,text\n1,"{text}"\n', "jsonl": json.dumps({"text": text}, ensure_ascii=False) + "\n"}
    for kind, content in contents.items():
        (tmp_path / f"a.{kind}").write_bytes(content.encode(encoding))
        texts, report = read(tmp_path / f"a.{kind}", kind)
        assert texts == [text], report.line()


def test_an_encoding_that_cannot_be_told_is_refused_and_one_that_is_given_is_used(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("안녕하세요".encode("euc_kr"))  # five signs: Chinese and Japanese characters as well
    with pytest.raises(ConfigError, match=r"1 in an encoding that cannot be told \(set data.encoding, e.g. cp1252 or gb18030\)"):
        read(file, "text")
    assert read(file, "text", encoding="euc-kr")[0] == ["안녕하세요"]
    with pytest.raises(ConfigError, match=r"encoding='euc-krr' is not allowed; it must be a name that Python knows"):
        read(file, "text", encoding="euc-krr")
    with pytest.raises(ConfigError, match=r"not text \(binary, or a wrong encoding\)"):
        read(file, "text", encoding="ascii")
    file.write_bytes(bytes(range(256)) * 20)
    with pytest.raises(ConfigError, match=r"1 (not text|in an encoding)"):
        read(file, "text")


def test_one_wrong_line_does_not_decide_about_the_file(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"Zeile {i}: größer."}, ensure_ascii=False).encode() for i in range(5)]
    (tmp_path / "a.jsonl").write_bytes(
        b"\n".join([*lines, '{"text": "Übergröße"}'.encode("cp1252"), b'{"text": "\xff\xfe\xfd broken"}'])
    )
    texts, report = read(tmp_path / "a.jsonl")
    assert texts == [*(f"Zeile {i}: größer." for i in range(5)), "Übergröße"]
    assert report.repaired == {"read as Windows-1252, not being UTF-8": 1}
    assert report.skipped == {"in an encoding that cannot be told (set data.encoding, e.g. cp1252 or gb18030)": 1}


def test_random_bytes_have_no_encoding() -> None:
    import random

    generator = random.Random(0)
    assert [encodings.guess(generator.randbytes(300)) for _ in range(20)] == [None] * 20


def test_a_report_keeps_the_first_three_rows_as_they_were_read(tmp_path: Path) -> None:
    given = [{"prompt": "", "completion": ""}, *({"prompt": f"{i}?", "completion": f"{i}!" * 300} for i in range(5))]
    _, report = read(rows(tmp_path, *given), tokenizer=Template())
    assert len(report.examples) == 3
    assert report.shown(40)[0] == f"user: 0? | assistant [...] {'0!' * 10}"
    assert "0!" not in json.dumps(report.as_dict()), "a record may leave the machine, the text stays"


def test_a_hub_that_cannot_be_reached_is_one_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request decides, with a time limit: the library datasets would try for half a minute."""
    import huggingface_hub

    asked = []

    def dead(self: Any, name: str, timeout: float) -> None:
        asked.append((name, timeout))
        raise ConnectionError("[Errno -2] Name or service not known\nand a long story")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dead)
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it would fail: it is not asked
    monkeypatch.setattr("calibration.text.sources.hub.importlib.util.find_spec", lambda _: object())
    with pytest.raises(ConfigError) as error:
        read("wikitext", "hub", config="wikitext-2-raw-v1")
    assert str(error.value) == (
        "data source.hub: data.path: the hub cannot be reached for 'wikitext' ([Errno -2] Name or service not known); "
        "look at the network, or read files: data=jsonl data.path=FILE"
    )
    assert asked == [("wikitext", 5.0)]


TINY = ["model=llama3-8b-tiny", "quantizer=int8", "logger=none"]


def test_too_little_text_warns_in_file_report_record_and_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("x")
    out, folder = tmp_path / "one.safetensors", tmp_path / "run"
    data = ["data=text", f"data.path={tmp_path / 'one.txt'}"]
    assert run.main([*TINY, *data, f"out={out}", f"hydra.run.dir={folder}"]) == 0
    (warning,) = ScaleFile.load(out).metadata["warnings"]
    assert warning.startswith("the scales come from 1 token")
    assert "%" in warning, "it says what that costs"
    assert f"WARNING: {warning}" in capsys.readouterr().out
    assert warning in json.loads((folder / "report.json").read_text())["warnings"]
    assert html.escape(warning) in (folder / "report.html").read_text()
    assert warning in json.loads((folder / "record.json").read_text())["rows"][0]["warnings"]
    with Engine.create(model=load_model("llama3-8b-tiny"), quantizer="int8", scales=ScaleFile.load(out), num_blocks=16) as engine:
        assert warning in engine.metrics()["warnings"], "whoever uses the file hears it too"


def test_shards_that_are_enough_together_warn_no_more() -> None:
    half = {"data_fingerprint": "a", "tokens": ENOUGH // 2 + 1, "documents": 1, "warnings": ["few"]}
    merged = Statistics({}, half).merged(Statistics({}, half | {"data_fingerprint": "b"}))
    assert merged.metadata["warnings"] == []
    assert (
        Statistics({}, half | {"tokens": 5})
        .merged(Statistics({}, half | {"data_fingerprint": "b", "tokens": 6}))
        .metadata["warnings"]
    )


def test_screen_and_report_show_the_first_rows_and_which_data_to_use_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = rows(tmp_path, *({"question": f"What is <{i}>?", "answer": "It is a number. " * (5 + i)} for i in range(12)))
    arguments = [f"data.path={file}", "data=jsonl", "sample.documents=8", "sample.held_back=4", "sample.tokens=64"]
    assert run.main([*TINY, *arguments, f"out={tmp_path / 's.safetensors'}", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    screen, page = capsys.readouterr().out, (tmp_path / "run/report.html").read_text()
    for i in range(3):
        assert f"row {i + 1} read as: What is <{i}>? It is a number." in screen
        assert f"<pre>What is &lt;{i}&gt;?\n\nIt is a number." in page
    assert "<h2>Which data to use next</h2>" in page
    assert "What is <" not in (tmp_path / "run/record.json").read_text()
    report = json.loads((tmp_path / "run/report.json").read_text())
    lines = " ".join(report["next_data"])
    assert all(0 <= share <= 1 for e in report["layers"] for share in e["beyond"].values())
    for part in (
        "More text: ",
        "12 documents are longer than 64 tokens",
        "every row is a conversation",
        "Latin script",
        "calibration.drift",
    ):
        assert part in lines


def test_ranges_that_still_grow_ask_for_more_of_the_same_data() -> None:
    sample = Sample([[1] * 9], [[1] * 9], "", 0, Report(rows=1, kept=1))
    still, done = ([{"layer": 3, "beyond": {"k": share, "v": 0.0}}] for share in (0.2, 0.01))
    assert "More documents like these: ranges still grow; on documents held back 10.0 % of the channels" in str(
        next_data(sample, 64, still)
    )
    assert "No more documents like these are needed" in str(next_data(sample, 64, done))


def test_a_template_that_writes_the_opening_token_does_not_double_it(tmp_path: Path) -> None:
    class Opens(Template):
        bos_token_id = 1

        def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool, tools: Any = None) -> str:
            return "<s> " + super().apply_chat_template(messages, tokenize)

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1] * add_special_tokens + [1 if word == "<s>" else 2 for word in text.split()]

    source = DATA.build({"name": "jsonl", "path": str(rows(tmp_path, {"messages": [USER, ASSISTANT]}, {"text": "A text."}))})
    sample = draw(source, Opens(), Sampling(documents=2, tokens=32, held_back=0), seed=0)
    assert sorted(sample.calibration, key=len) == [[1, 2, 2], [1, *[2] * len(READ.split())]]
