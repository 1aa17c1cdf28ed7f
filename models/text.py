"""The free text that the pair of models learns from: named repositories → one file a source.

`sources.tsv` names every repository with its commit and licence. A folder of git directories named
owner+name is used where it has one; other repositories are cloned into it.
"""

import argparse
import csv
import json
import re
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple
from xml.etree import ElementTree

from malmoi.text.documents import read_documents

HERE = Path(__file__).parent
SPACE = re.compile(r"\s+")
# typographic quotes as the keyboard's, joiners and odd spaces out: what users type has neither
PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "\u2060": "", "\ufeff": ""})
PLAIN |= str.maketrans(dict.fromkeys("\u200a\u2009\u202f\u00a0", " "))


class Source(NamedTuple):
    """A repository at a commit, and how its files are read."""

    name: str
    reader: str
    repository: str
    commit: str
    licence: str
    title: str
    bytes: str


def plain(text: str) -> str:
    return SPACE.sub(" ", text.translate(PLAIN)).strip()


class Repository:
    """A git directory's files at one commit."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder = folder
        self.commit = commit

    @classmethod
    def open(cls, name: str, commit: str, clones: Path) -> "Repository":
        folder = clones / name.replace("/", "+")
        if not folder.exists():
            url = f"https://github.com/{name}"
            command = ["git", "clone", "--quiet", "--bare", url, str(folder)]
            subprocess.run(command, check=True)
        return cls(folder, commit)

    def _git(self, *words: str, text: str | None = None) -> bytes:
        command = ["git", "-C", str(self.folder), *words]
        sent = None if text is None else text.encode()
        return subprocess.run(command, input=sent, stdout=subprocess.PIPE, check=True).stdout

    def paths(self, pattern: str) -> list[str]:
        """Its files that match, in the order of their numbers."""
        listing = self._git("ls-tree", "-r", "-z", "--name-only", self.commit).decode()
        found = [path for path in listing.split("\0") if re.fullmatch(pattern, path)]
        digits = re.compile(r"(\d+)")
        return sorted(
            found, key=lambda path: [w.zfill(9) if w.isdigit() else w for w in digits.split(path)]
        )

    def read(self, paths: list[str]) -> Iterator[tuple[str, str]]:
        """(path, text) of each file that the repository holds."""
        for at in range(0, len(paths), 64):
            part = paths[at : at + 64]
            names = "".join(f"{self.commit}:{path}\n" for path in part)
            found = self._git("cat-file", "--batch", text=names)
            place = 0
            for path in part:
                end = found.index(b"\n", place)
                header = found[place:end].decode()
                place = end + 1
                if header.endswith(" missing"):
                    continue
                size = int(header.rsplit(" ", 1)[1])
                yield path, found[place : place + size].decode("utf-8", "replace")
                place += size + 1


def _tag(node: ElementTree.Element) -> str:
    return node.tag.rsplit("}", 1)[-1] if isinstance(node.tag, str) else ""


def _inside(node: ElementTree.Element, without: frozenset[str]) -> str:
    """The text of a node but for the parts named."""
    parts = [node.text or ""]
    for child in node:
        if _tag(child) not in without:
            parts.append(_inside(child, without))
        parts.append(child.tail or "")
    return "".join(parts)


def _blocks(
    node: ElementTree.Element, wanted: frozenset[str], without: frozenset[str]
) -> Iterator[ElementTree.Element]:
    for child in node:
        tag = _tag(child)
        if tag in without:
            continue
        if tag in wanted:
            yield child
        else:
            yield from _blocks(child, wanted, without)


def _parse(text: str) -> ElementTree.Element | None:
    try:
        without = re.sub(r"<!DOCTYPE[^>]*>", "", text)  # and so without entities
        return ElementTree.fromstring(without)  # noqa: S314
    except ElementTree.ParseError:
        return None


FRONT = r"colophon|imprint|titlepage|uncopyright|halftitle\w*|endnotes|toc|loi|dramatis-personae"
NOTES = frozenset(("noteref", "sup", "head"))


def standard_ebooks(repository: Repository) -> Iterator[str]:
    """A document for each chapter of a book, a line for each paragraph."""
    paths = repository.paths(rf"src/epub/text/(?!(?:{FRONT})\.)[^/]*\.xhtml")
    for _, text in repository.read(paths):
        # a reference to a note is <a epub:type="noteref">
        root = _parse(re.sub(r'<a [^>]*epub:type="noteref"[^>]*>[^<]*</a>', "", text))
        if root is not None:
            blocks = _blocks(root, frozenset(("p",)), frozenset(("head", "table", "math")))
            yield "\n".join(line for p in blocks if (line := plain(_inside(p, NOTES))))


MATH = frozenset(("math", "equation", "code"))
ASIDE = frozenset(
    ("metadata", "exercise", "figure", "table", "equation", "code", "media", "footnote", "list")
)


def openstax(repository: Repository) -> Iterator[str]:
    """A document for each module of a textbook, its paragraphs without formulas."""
    for _, text in repository.read(repository.paths(r"modules/[^/]+/index\.cnxml")):
        root = _parse(text)
        if root is None or "licenses/by-nc" in text:
            continue
        lines = []
        for para in _blocks(root, frozenset(("para", "meaning")), ASIDE):
            if not any(_tag(part) in MATH for part in para.iter()):
                lines.append(plain(_inside(para, frozenset(("footnote", "media", "note")))))
        yield "\n".join(line for line in lines if len(line) > 40)


FORMULAS = frozenset(("xref", "inline-formula", "disp-formula", "fig", "table-wrap", "sup", "sub"))


def elife(repository: Repository) -> Iterator[str]:
    """What every twelfth article says in its title, abstract, digest and introduction."""
    last = {re.sub(r"-v\d+", "", path): path for path in repository.paths(r"articles/.*\.xml")}
    for _, text in repository.read(sorted(last.values())[::12]):
        root = _parse(text)
        if root is None or not re.search(r"creativecommons.org/(licenses/by|publicdomain)/", text):
            continue
        nodes = [*root.iter("abstract"), *list(root.iter("sec"))[:1]]
        lines = []
        for p in (p for node in nodes for p in node.iter("p")):
            line = plain(_inside(p, FORMULAS))
            line = re.sub(r"\s*[(\[][\s;,.]*(?:e\.g\.|see|and|reviewed in)?[\s;,.]*[)\]]", "", line)
            if len(line) > 80 and "DOI" not in line:
                lines.append(line)
        title = root.find(".//title-group/article-title")
        head = [] if title is None else [plain(_inside(title, FORMULAS))]
        yield "\n".join(head + lines)


def wordnet(repository: Repository) -> Iterator[str]:
    """Two hundred neighbouring words with their meanings and examples a document."""
    entries: list[str] = []
    for _, text in repository.read(repository.paths(r"src/yaml/(?:noun|verb|adj|adv)\..*\.yaml")):
        for block in re.split(r"^(?=\S)", text, flags=re.M):
            words = ", ".join(word.replace("_", " ") for word in _values(block, "members")[:4])
            said = " ".join(f'"{example}"' for example in _values(block, "example")[:2])
            meaning = _values(block, "definition")[:1]
            if words and meaning:
                entries.append(plain(f"{words}: {meaning[0]}. {said}"))
    for at in range(0, len(entries), 200):
        yield "\n".join(entries[at : at + 200])


def _values(block: str, field: str) -> list[str]:
    """A field's list in a block of YAML, lines that go on joined, quotes taken off."""
    found = re.search(rf"^  {field}:\n((?:  - .*\n|    .*\n)+)", block, flags=re.M)
    values = re.split(r"^  - ", found[1], flags=re.M)[1:] if found else []
    return [plain(value).strip("'\"").replace("''", "'") for value in values]


def factbook(repository: Repository) -> Iterator[str]:
    """A document for each country: the entries that are sentences."""
    for path, text in repository.read(repository.paths(r"[a-z-]+/[a-z]+\.json")):
        if path.startswith("meta"):
            continue
        lines: list[str] = []

        def visit(value: object, lines: list[str] = lines) -> None:
            if isinstance(value, dict):
                for key, part in value.items():
                    if key == "text" and isinstance(part, str) and len(part.split()) >= 20:
                        lines.append(plain(re.sub(r"<[^>]+>|&\w+;", " ", part)))
                    visit(part)

        visit(json.loads(text))
        yield "\n".join(lines)


def dialogues(repository: Repository) -> Iterator[str]:
    """A document for each conversation, a line for each turn."""
    for path, text in repository.read(repository.paths(r".*/data/data_\d+\.json|data/.*\.csv")):
        if path.endswith(".json"):
            for talk in json.loads(text):
                turns = [plain(turn.get("text", "")) for turn in talk.get("utterances", ())]
                yield "\n".join(turn for turn in turns if turn)
        else:
            for row in csv.DictReader(text.splitlines(keepends=True)):
                talk = row.get("Best Generated Conversation", "")
                lines = (re.sub(r"^User \d: ?", "", line) for line in talk.splitlines())
                yield "\n".join(line for line in map(plain, lines) if line)


def questions_ko(repository: Repository) -> Iterator[str]:
    """Forty remarks and their answers a document."""
    for _, text in repository.read(repository.paths(r"ChatbotData\s*\.csv")):
        rows = [
            f"{plain(row['Q'])}\n{plain(row['A'])}" for row in csv.DictReader(text.splitlines())
        ]
        for at in range(0, len(rows), 40):
            yield "\n".join(rows[at : at + 40])


def markdown_ko(repository: Repository) -> Iterator[str]:
    """Korean pages of documentation: their sentences without code."""
    pattern = r"src/content/.*\.md|content/ko/.*\.md|learn-pr/.*\.(?:md|yml)"
    pattern += r"|chapters/ko/.*\.mdx|(?:second-edition/)?src/[^/]*\.md"
    for _, text in repository.read(repository.paths(pattern)):
        text = re.sub(r"\A---\n.*?\n---\n|```.*?```|<!--.*?-->|~~~.*?~~~", "", text, flags=re.S)
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)|\{\{.*?\}\}|\{/\*.*?\*/\}|</?[^>\n]+>", "", text)
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        lines = []
        for line in text.splitlines():
            line = plain(re.sub(r"^[\s#>*+-]+|^\s*\d+\.\s|[`*_]{1,3}", "", line))
            if len(line) > 20 and len(re.findall("[가-힣]", line)) > 0.4 * len(line):
                lines.append(line)
        yield "\n".join(lines)


READERS: dict[str, Callable[[Repository], Iterator[str]]] = {
    "standard-ebooks": standard_ebooks,
    "openstax": openstax,
    "elife": elife,
    "wordnet": wordnet,
    "factbook": factbook,
    "dialogues": dialogues,
    "questions-ko": questions_ko,
    "markdown-ko": markdown_ko,
}


def sources() -> list[Source]:
    with (HERE / "sources.tsv").open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t")
        next(rows)
        return [Source(*row) for row in rows]


# text that is in no repository: how it is split, one document in so many held out, bytes at most
FILES = {
    "speeches": ("auto", 50, 1 << 40),
    "korean": ("auto", 50, 1 << 40),
    "bills": ("blank", 200, 25_000_000),
    "reviews": ("line", 200, 1 << 40),
}


def write_repositories(clones: Path, out: Path) -> None:
    """One JSON Lines file a source; the books of `books-valid` are for validation."""
    for name in dict.fromkeys(source.name for source in sources()):
        place = out / ("valid/books" if name == "books-valid" else f"train/{name}")
        with place.with_suffix(".jsonl").open("w", encoding="utf-8") as file:
            for source in sources():
                if source.name == name:
                    repository = Repository.open(source.repository, source.commit, clones)
                    size = _append(file, READERS[source.reader](repository))
                    print(name, source.repository, size, sep="\t", flush=True)


def write_file(name: str, text: str, out: Path) -> None:
    """Splits a text into documents, some of which are for validation."""
    documents, share, most = FILES[name]
    found = [plain_lines(d.text) for d in read_documents([text], documents=documents)]
    held = [zlib.crc32(d.encode()) % share == 0 for d in found]
    with (out / f"valid/{name}.jsonl").open("w", encoding="utf-8") as file:
        _append(file, (d for d, apart in zip(found, held, strict=True) if apart))
    with (out / f"train/{name}.jsonl").open("w", encoding="utf-8") as file:
        size = _append(file, (d for d, apart in zip(found, held, strict=True) if not apart), most)
    print(name, text, size, sep="\t", flush=True)


def plain_lines(text: str) -> str:
    return "\n".join(line for line in map(plain, text.splitlines()) if line)


def _append(file: IO[str], texts: Iterable[str], most: int = 1 << 40) -> int:
    size = 0
    for text in texts:
        if text and size < most:
            size += len(text.encode())
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clones", type=Path, required=True, help="folder of git directories")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bills", required=True, help="bill rationales, CC BY 4.0")
    parser.add_argument("--reviews", required=True, help="NSMC's raw reviews, CC0")
    given = parser.parse_args()
    for part in ("train", "valid"):
        (given.out / part).mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("speeches", "builtin:sotu"),
        ("korean", "builtin:korean"),
        ("bills", given.bills),
        ("reviews", given.reviews),
    ):
        write_file(name, text, given.out)
    write_repositories(given.clones, given.out)
