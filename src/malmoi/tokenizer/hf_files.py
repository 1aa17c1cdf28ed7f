"""Reading tokenizer files; errors name the file and the line."""

from pathlib import Path

from tokenizers import Tokenizer as Rust

from malmoi.errors import MalmoiError, ensure, required
from malmoi.messages import msg
from malmoi.system.untrusted import (
    parse_object,
    read_object,
    read_optional_object,
    read_text,
    shown,
)
from malmoi.tokenizer import pipeline, sentencepiece_model
from malmoi.tokenizer.checks import check_ids, check_state, panics_explained
from malmoi.tokenizer.hf_settings import (
    BERT_SETTINGS,
    Settings,
    class_name,
    read_settings,
    register,
    special_token_settings,
)
from malmoi.tokenizer.pipeline import (
    ALBERT_SPECIALS,
    BERT_SPECIALS,
    GPT1_SPECIALS,
    GPT2_SPECIALS,
    LLAMA_SPECIALS,
    MARIAN_FILES,
    MARIAN_SPECIALS,
    ROBERTA_SPECIALS,
    SPECIAL_ROLES,
    Merges,
    State,
    Vocab,
)
from malmoi.tokenizer.sentencepiece_model import MarianPieces, read_sentencepiece

BPE_FILES = (("vocab.json", "merges.txt"), ("encoder_bpe_40000.json", "vocab_40000.bpe"))
WORDPIECE_CLASSES = {f"{name}Tokenizer" for name in ("Bert", "DistilBert", "Electra", "MobileBert")}
GENERIC_CLASSES = {"PreTrainedTokenizer", "TokenizersBackend"}
SENTENCEPIECE_FILES = ("sentencepiece.bpe.model", "spiece.model", "tokenizer.model")
# how a class of transformers reads a SentencePiece model, and its special tokens
SENTENCEPIECE_CLASSES = {
    "XLMRobertaTokenizer": (sentencepiece_model.xlm_roberta, ROBERTA_SPECIALS),
    "AlbertTokenizer": (sentencepiece_model.albert, ALBERT_SPECIALS),
    "LlamaTokenizer": (sentencepiece_model.llama, LLAMA_SPECIALS),
}
MODEL_CLASSES = {
    "xlm-roberta": "XLMRobertaTokenizer",
    "albert": "AlbertTokenizer",
    "llama": "LlamaTokenizer",
    "marian": "MarianTokenizer",
}


def read_tokenizer_files(
    path: Path,
) -> tuple[Rust, Settings, MarianPieces | None, str, State | None]:
    """The tokenizer of a folder or file: all that `Tokenizer` takes."""
    ensure(path.exists(), "There is no tokenizer at {path}: no such file or folder.", path=path)
    folder = path if path.is_dir() else path.parent
    settings = read_settings(folder)
    pieces = model = None
    if path.is_dir() and _is_marian(folder, settings):
        rust, pieces = read_marian(folder, settings)
    else:
        rust, model = _read_file(_file_in(path) if path.is_dir() else path, settings)
    config = folder / "tokenizer_config.json"
    with panics_explained(
        msg("The special tokens that {folder} names cannot be added", folder=config)
    ):
        register(rust, settings)
    return rust, settings, pieces, str(path), model


def has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "vocab.txt", "vocab.json", *SENTENCEPIECE_FILES)
    return any((folder / name).is_file() for name in names)


def _file_in(folder: Path) -> Path:
    names = ("tokenizer.json", "vocab.txt", *dict(BPE_FILES).values(), *SENTENCEPIECE_FILES)
    return required(
        next((path for name in names if (path := folder / name).exists()), None),
        "There is no tokenizer in {folder}: it needs tokenizer.json, vocab.txt, vocab.json and "
        "merges.txt, or SentencePiece's {files}, or source.spm, target.spm and vocab.json.",
        raises=MalmoiError,
        folder=folder,
        files=", ".join(SENTENCEPIECE_FILES),
    )


def _read_file(path: Path, settings: Settings) -> tuple[Rust, State | None]:
    for vocab, merges in BPE_FILES:
        if path.name in (vocab, merges):
            return read_bpe(path.with_name(vocab), path.with_name(merges), settings), None
    if path.suffix == ".txt":
        return read_wordpiece(path, settings), None
    if path.suffix in (".model", ".spm"):
        return read_sentencepiece_file(path, settings), None
    return _read_whole(path, settings)


def _read_whole(path: Path, settings: Settings) -> tuple[Rust, State | None]:
    """Like transformers' BERT classes, lets tokenizer_config.json override the normalizer."""
    rust, model = parse_rust(read_text(path), str(path))
    is_bert = type(rust.normalizer).__name__ == "BertNormalizer"
    if is_bert and class_name(settings) in WORDPIECE_CLASSES:
        for key in BERT_SETTINGS.keys() & settings.keys():  # true, false or null: they are checked
            setattr(rust.normalizer, BERT_SETTINGS[key], settings[key])
    return rust, model


def parse_rust(text: str, where: str) -> tuple[Rust, State | None]:
    """A tokenizer from the text of a tokenizer.json, and its model unless in an older form.

    Older files name no type, or write a merge as one text. `where` names the text in errors.
    """
    state = parse_object(text, where)
    check_state(state)
    with panics_explained(msg("{where} is not a tokenizer.json that can be used", where=where)):
        rust = Rust.from_str(text)
    ensure(rust.get_vocab_size() != 0, "{where} has an empty vocabulary.", where=where)
    model = state.object("model")
    older = "type" not in model or isinstance((model.get("merges") or [[]])[0], str)
    return rust, None if older else dict(model)


def read_sentencepiece_file(path: Path, settings: Settings) -> Rust:
    """Reads a SentencePiece model by the rules of its class, which the file does not tell."""
    name = _class_beside(path, settings)
    ensure(
        name in SENTENCEPIECE_CLASSES,
        "{path} does not tell which tokenizer it belongs to: give its tokenizer_class in "
        "a tokenizer_config.json beside it. Known: {classes}.",
        path=path,
        classes=", ".join(SENTENCEPIECE_CLASSES),
    )
    build, usual = SENTENCEPIECE_CLASSES[name]
    model = read_sentencepiece(path)
    names = _names(usual, settings)
    settings |= {f"{role}_token": settings.get(f"{role}_token") or names[role] for role in names}
    with panics_explained(msg("The tokenizer {where} cannot be used", where=path)):
        rust = build(model, names, settings)
        _make_special(rust, rust.get_vocab(), names, settings)
        sentencepiece_model.add_own_tokens(rust, model, names)
    return rust


def _is_marian(folder: Path, settings: Settings) -> bool:
    """As for transformers, a Marian's models count more than a tokenizer.json beside them."""
    if not all((folder / name).exists() for name in ("vocab.json", *MARIAN_FILES.values())):
        return False
    return _class_beside(folder / "vocab.json", settings) == "MarianTokenizer"


def read_marian(folder: Path, settings: Settings) -> tuple[Rust, MarianPieces]:
    """Reads vocab.json, which numbers the pieces of two SentencePiece models."""
    ensure(
        not settings.get("separate_vocabs"),
        "{folder} has a vocabulary for each language (separate_vocabs); Malmoi needs one for both.",
        folder=folder,
    )
    names = _names(MARIAN_SPECIALS, settings)
    path = folder / "vocab.json"
    vocab = read_vocab_json(path)
    for name in names.values():
        ensure(name in vocab, "{path} has no {name}, which a Marian needs.", path=path, name=name)
    source, target = (read_sentencepiece(folder / name).data for name in MARIAN_FILES.values())
    with panics_explained(msg("The tokenizer {where} cannot be used", where=folder)):
        rust = pipeline.marian_pipeline(vocab, names)
        _make_special(rust, vocab, names, settings)
        return rust, MarianPieces(source, target)


def _class_beside(path: Path, settings: Settings) -> str:
    """The class of a tokenizer: tokenizer_config.json's, or that of the model beside it."""
    model = read_optional_object(path.with_name("config.json"))
    kind = model.text("model_type", default="")
    return class_name(settings) or class_name(model) or MODEL_CLASSES.get(kind, "")


def _names(usual: dict[str, str], settings: Settings) -> dict[str, str]:
    return {role: special_token_settings(settings, role) or usual[role] for role in usual}


def read_wordpiece(path: Path, settings: Settings) -> Rust:
    """Reads BERT's vocab.txt: one token per line, its id the line number from 0."""
    _expect_class(path, settings, WORDPIECE_CLASSES)
    vocab = read_vocab_lines(path)
    names = _names(BERT_SPECIALS, settings)
    for role in ("unk", "cls", "sep"):
        ensure(
            names[role] in vocab,
            "{path} has no {name}: if its {role} token has another name, give it as {role}_token "
            "in a tokenizer_config.json beside it.",
            path=path,
            name=names[role],
            role=role,
        )
    rust = pipeline.bert_pipeline(
        vocab,
        names,
        lowercase=settings.get("do_lower_case", not looks_cased(vocab)),
        strip_accents=settings.get("strip_accents"),
        chinese=settings.get("tokenize_chinese_chars", True),
    )
    _make_special(rust, vocab, names, settings)
    return rust


def looks_cased(vocab: Vocab) -> bool:
    """Whether a vocabulary was made without lowercasing: it has capitals or Hangul syllables.

    BERT's lowercasing also strips accents, which splits syllables into Jamo.
    """
    words = "".join(token for token in vocab if token[:1] not in ("[", "<"))
    return words != words.lower() or any("가" <= letter <= "힣" for letter in words)


def read_bpe(vocab_path: Path, merges_path: Path, settings: Settings) -> Rust:
    """Reads vocab.json and merges.txt: GPT-1's if words end in `</w>`, else byte-level BPE."""
    _expect_class(vocab_path, settings, {"GPT2Tokenizer", "OpenAIGPTTokenizer", "RobertaTokenizer"})
    vocab = read_vocab_json(vocab_path)
    merges = read_merges(merges_path, vocab)
    prefix_space = settings.get("add_prefix_space", False)
    if any(token.endswith("</w>") for token in vocab):
        unk = special_token_settings(settings, "unk") or GPT1_SPECIALS["unk"]
        rust = pipeline.gpt1_pipeline(vocab, merges, unk=unk)
        names = {"unk": unk}
    elif class_name(settings) != "GPT2Tokenizer" and vocab.keys() >= {*ROBERTA_SPECIALS.values()}:
        names = ROBERTA_SPECIALS
        rust = pipeline.roberta_pipeline(vocab, merges, names, prefix_space=prefix_space)
    else:
        names = GPT2_SPECIALS
        rust = pipeline.gpt2_pipeline(vocab, merges, prefix_space=prefix_space)
    _make_special(rust, vocab, names, settings)
    return rust


def _make_special(rust: Rust, vocab: Vocab, names: dict[str, str], settings: Settings) -> None:
    """Marks the family's special tokens as such, if the vocabulary has them."""
    tokens = [
        settings.get(f"{role}_token") or names[role] for role in SPECIAL_ROLES if role in names
    ]
    rust.add_special_tokens(
        [added for token in tokens if (added := pipeline.added(token)).content in vocab]
    )


def read_vocab_lines(path: Path) -> Vocab:
    """A vocabulary of one token per line; a duplicate is an error."""
    vocab: Vocab = {}
    for number, token in enumerate(read_text(path).removesuffix("\n").split("\n")):
        if token in vocab:
            before = dict(token=shown(token), first=vocab[token] + 1)
            raise _wrong_line(path, number + 1, msg("{token} is already on line {first}", **before))
        vocab[token] = number
    ensure(vocab.keys() - {""}, "{path} is empty: it has no token.", path=path)
    return vocab


def read_vocab_json(path: Path) -> Vocab:
    """A vocabulary as one JSON object from token to id."""
    vocab = dict(read_object(path))
    ensure(vocab, "{path} is empty: it has no token.", path=path)
    check_ids(vocab, str(path))
    return vocab


def read_merges(path: Path, vocab: Vocab) -> Merges:
    """Reads BPE merges: two tokens per line, both and their join in the vocabulary."""
    merges: Merges = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise _wrong_line(
                path,
                number,
                msg("{line} is not a merge: two tokens and one space", line=shown(line)),
            )
        for token in (left, right, left + right):
            if token not in vocab:
                raise _wrong_line(
                    path,
                    number,
                    msg("{token} is not in the vocabulary beside it", token=shown(token)),
                )
        merges.append((left, right))
    return merges


def _wrong_line(path: Path, number: int, what: str) -> MalmoiError:
    return MalmoiError("{path}, line {number}: {wrong}.", path=path, number=number, wrong=what)


def _expect_class(path: Path, settings: Settings, known: set[str]) -> None:
    """Refuses a vocabulary whose rules only a tokenizer.json has, or had."""
    name = class_name(settings)
    ensure(
        name not in GENERIC_CLASSES,
        "{parent} has no tokenizer.json, which alone has the rules of its tokenizer: the "
        "copy is incomplete, or its writing was interrupted.",
        parent=path.parent,
    )
    ensure(
        name in {*known, ""},
        "{path} belongs to a {name}, whose rules are not in these files: load the tokenizer.json "
        "that transformers writes (AutoTokenizer.from_pretrained(…).save_pretrained(…)).",
        path=path,
        name=name,
    )
