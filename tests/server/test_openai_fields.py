"""OpenAI's fields beyond the prompt: penalties, biases, lengths, structured output, embeddings."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from live_server import TEXTS, Live, bert_with, gpt_folder
from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.inference import Model, load
from malmoi.tokenizer import train_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "한글"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
}
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(gpt_folder(tmp_path_factory.mktemp("gpt") / "gpt"), device="cpu")


@pytest.fixture(scope="module")
def live(gpt: Model) -> Iterator[Live]:
    words = train_tokenizer(TEXTS, kind="wordpiece", vocab=120)
    bert = bert_with(words, mlm=0)
    models = {"gpt": gpt, "bert": bert, "encoder": sentence_encoder(bert)}
    models["cross"] = bert_with(words, ("LABEL_0",), classify=1)
    models["pairs"] = bert_with(words, ("no", "yes"), classify=2)
    with Live(models, slots=4, timeout=60, max_tokens=90) as server:
        yield server


def sentence_encoder(bert: Model) -> Model:
    return Model(replace(bert.checkpoint, sentence=SentencePooling(normalize=True)))


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def complete(client: openai.OpenAI, **options: Any) -> str:
    given = {"model": "gpt", "prompt": "the state", "max_tokens": 30, "temperature": 0} | options
    return client.completions.create(**given).choices[0].text


def test_penalties_follow_openais_formula(client: openai.OpenAI, gpt: Model) -> None:
    """Each token is the best one after the penalties of those generated before it."""
    prompt = gpt.tokenizer.encode("the state", specials=False).tokens
    tokens = list(prompt)
    options = {"frequency_penalty": 1.5, "presence_penalty": 0.7}
    for _ in range(20):
        counts = np.bincount(tokens[len(prompt) :], minlength=gpt.config.vocab)
        text = gpt.tokenizer.decode(tokens)
        if gpt.tokenizer.encode(text, specials=False).tokens != tokens:
            break  # the text would be tokenized differently
        logits = gpt.logits(text)[-1] - 1.5 * counts - 0.7 * (counts > 0)
        tokens.append(int(logits.argmax()))
    written = gpt.tokenizer.decode(tokens[len(prompt) :])
    assert len(tokens) > len(prompt) + 1
    limit = len(tokens) - len(prompt)
    assert complete(client, max_tokens=limit, **options).startswith(written[:-1])
    assert complete(client, **options) != complete(client)


def test_a_bias_forces_and_forbids_tokens(client: openai.OpenAI, gpt: Model) -> None:
    token = gpt.tokenizer.encode("a", specials=False).tokens[0]
    assert complete(client, logit_bias={str(token): 100}, max_tokens=5) == "aaaaa"
    best = gpt.tokenizer.encode(complete(client, max_tokens=1), specials=False).tokens[0]
    banned = complete(client, logit_bias={str(best): -100}, max_tokens=1)
    assert banned != complete(client, max_tokens=1)


def test_min_p_of_one_is_greedy(client: openai.OpenAI) -> None:
    sampled = complete(client, temperature=1, seed=3, extra_body={"min_p": 1.0})
    assert sampled == complete(client)
    assert sampled != complete(client, temperature=1, seed=3)


def test_the_end_of_text_can_be_delayed_or_ignored(live: Live, gpt: Model) -> None:
    end = gpt.tokenizer.specials.eos
    ask = {"model": "gpt", "prompt": "the", "max_tokens": 12, "logit_bias": {str(end): 100}}

    def tokens(**more: Any) -> tuple[int, str]:
        answer = httpx.post(f"{live.url}/v1/completions", json=ask | more, timeout=60).json()
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    assert tokens() == (1, "stop")
    assert tokens(min_tokens=5) == (6, "stop")
    assert tokens(ignore_eos=True) == (12, "length")


@pytest.mark.parametrize("seed", range(3))
def test_generated_text_follows_a_schema(client: openai.OpenAI, seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    answer = client.chat.completions.create(
        model="gpt", messages=USER, seed=seed, max_tokens=90, response_format=form
    )
    found = json.loads(answer.choices[0].message.content)
    assert set(found) <= {"name", "age", "tags"}
    assert isinstance(found["age"], int)
    assert len(found["name"]) <= 6
    assert set(found.get("tags", [])) <= {"a", "한글"}


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("guided_choice", ["yes", "no"], {"yes", "no"}),
        ("guided_regex", "(ab|cd){2}", {"abab", "abcd", "cdab", "cdcd"}),
        ("guided_json", {"enum": [1, "x", None]}, {"1", '"x"', "null"}),
    ],
)
def test_guided_text(client: openai.OpenAI, field: str, value: Any, allowed: set[str]) -> None:
    for seed in range(4):
        assert complete(client, temperature=1, seed=seed, extra_body={field: value}) in allowed


def test_any_json_object(client: openai.OpenAI) -> None:
    for seed in range(3):
        form = {"response_format": {"type": "json_object"}}
        text = complete(client, temperature=1, seed=seed, max_tokens=40, extra_body=form)
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"type": "strin"}, "json_schema is invalid: Invalid type: strin."),
        ({"$ref": "#/$defs/a"}, "Pointer '/$defs/a' does not exist"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable schema"),
        ({"type": "object", "required": ["x"], "additionalProperties": False}, "Unsatisfiable"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
    ],
)
def test_an_unsupported_schema_is_refused(
    gpt: Model, live: Live, schema: dict[str, Any], sentence: str
) -> None:
    body = {"model": "gpt", "prompt": "a", "guided_json": schema}
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]


def test_a_schema_may_come_without_a_name(client: openai.OpenAI) -> None:
    """As instructor's JSON_SCHEMA mode and Together's clients send it."""
    form: Any = {"type": "json_object", "schema": PERSON}
    answer = client.chat.completions.create(
        model="gpt", messages=USER, seed=1, max_tokens=90, response_format=form
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["age"], int)


def test_two_constraints_are_refused(live: Live) -> None:
    body = {"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]}
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
    message = answer.json()["error"]["message"]
    assert (answer.status_code, message) == (
        400,
        "guided_regex and guided_choice cannot be combined: choose one.",
    )


@pytest.mark.parametrize(
    "neutral",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"store": True, "service_tier": "flex", "metadata": {"a": "b"}, "user": "me"},
        {"response_format": {"type": "text"}, "logit_bias": {}},
        {"temperature": None, "n": None, "stream": None, "stop": None, "tools": None},
        {"reasoning_effort": "high", "verbosity": "medium", "use_beam_search": False},
        {"max_tokens": None, "max_completion_tokens": 5, "stop_token_ids": []},
        {"prompt_cache_key": "a", "safety_identifier": "b", "priority": 1, "request_id": "c"},
    ],
)
def test_fields_with_empty_values_change_nothing(live: Live, neutral: dict[str, Any]) -> None:
    body = {"model": "gpt", "messages": USER, "max_tokens": 5, "seed": 1}
    plain, same = (
        httpx.post(f"{live.url}/v1/chat/completions", json=one, timeout=60).json()["choices"]
        for one in (body, body | neutral)
    )
    assert same == plain


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "no chat template with tools",
        ),
        ({"functions": [{"name": "f"}]}, "functions is not offered by this server: omit it."),
        ({"verbosity": "high"}, "verbosity is not offered"),
        ({"modalities": ["text", "audio"]}, "modalities is not offered"),
        (
            {"messages": [*USER, {"role": "tool", "content": "3"}]},
            "messages: the model 'gpt' has no",
        ),
        ({"response_format": {"type": "text", "json": 1}}, "response_format.json: Extra inputs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages.0.content.0.type: Input should be 'text'",
        ),
        ({"messages": [*USER, {"content": "a"}]}, "messages.1.role: Field required."),
    ],
)
def test_unsupported_fields_give_a_clear_error(
    live: Live, asked: dict[str, Any], sentence: str
) -> None:
    body = {"messages": USER} | asked
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]


def test_a_developer_message_is_a_system_message(live: Live) -> None:
    def reply(role: str) -> str:
        body = {"messages": [{"role": role, "content": "be kind"}, *USER], "seed": 1}
        answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60)
        return answer.json()["choices"][0]["message"]["content"]

    assert reply("developer") == reply("system")


def test_embeddings_of_many_texts(client: openai.OpenAI) -> None:
    texts = [f"the state {i}" for i in range(2048)]
    found = client.embeddings.create(model="bert", input=texts, encoding_format="float").data
    assert len(found) == 2048
    alone = client.embeddings.create(model="bert", input=texts[7], encoding_format="float").data
    assert found[7].embedding == pytest.approx(alone[0].embedding, abs=1e-5)
    with pytest.raises(openai.BadRequestError, match="- input: List should have at most 2048"):
        client.embeddings.create(model="bert", input=[*texts, "one more"])


def test_embeddings_are_cut_and_scaled(client: openai.OpenAI) -> None:
    ask = {"model": "bert", "input": "the state of", "encoding_format": "float"}
    whole = np.array(client.embeddings.create(**ask).data[0].embedding)
    cut = client.embeddings.create(**ask, dimensions=8).data[0].embedding
    assert cut == pytest.approx(whole[:8])
    unit = client.embeddings.create(**ask, dimensions=8, extra_body={"normalize": True})
    assert unit.data[0].embedding == pytest.approx(whole[:8] / np.linalg.norm(whole[:8]))


def test_a_sentence_encoder_gives_vectors_of_length_one(client: openai.OpenAI) -> None:
    ask = {"model": "encoder", "input": ["the state of", "a"], "encoding_format": "float"}
    for options in ({}, {"dimensions": 8}):
        found = client.embeddings.create(**ask, **options).data
        lengths = [float(np.linalg.norm(one.embedding)) for one in found]
        assert lengths == pytest.approx([1, 1])
    plain = client.embeddings.create(**ask, extra_body={"normalize": False}).data
    assert float(np.linalg.norm(plain[0].embedding)) > 1.5


@pytest.mark.parametrize("texts", ["", ["a", ""]])
def test_an_empty_text_is_not_embedded(client: openai.OpenAI, texts: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="empty text"):
        client.embeddings.create(model="bert", input=texts)


@pytest.mark.parametrize("model", ["cross", "pairs"])
def test_documents_are_ranked_by_a_cross_encoder(live: Live, model: str) -> None:
    documents = ["a small model", {"text": "the union is strong"}, "yes", "하늘이 맑다"]
    ask = {"model": model, "query": "the state", "documents": documents, "top_n": 3}
    answer = httpx.post(f"{live.url}/v1/rerank", json=ask, timeout=60).json()
    texts = [one if isinstance(one, str) else one["text"] for one in documents]
    found = live.registry.get(model).model.predict([("the state", text) for text in texts])
    values = np.array([list(one.scores.values())[-1] for one in found])
    scores = 1 / (1 + np.exp(-values)) if model == "cross" else values
    best = np.argsort(-scores)[:3].tolist()
    assert [one["index"] for one in answer["results"]] == best
    assert [one["document"]["text"] for one in answer["results"]] == [texts[i] for i in best]
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(scores[best])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_by_a_sentence_encoder(live: Live, path: str) -> None:
    documents = ["a small model", "the union is strong", "yes"]
    ask = {"model": "encoder", "query": "the state", "documents": documents}
    answer = httpx.post(f"{live.url}{path}", json=ask, timeout=60).json()
    query, *vectors = live.registry.get("encoder").model.embed(["the state", *documents])
    cosines = [float(query @ one) for one in vectors]  # of length one
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert [found[i] for i in range(3)] == pytest.approx(cosines, abs=1e-5)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_other_models_do_not_rank(live: Live) -> None:
    ask = {"model": "bert", "query": "a", "documents": ["b"]}
    answer = httpx.post(f"{live.url}/v1/rerank", json=ask, timeout=60)
    assert answer.status_code == 400
    assert "is neither a cross-encoder" in answer.json()["error"]["message"]


def test_python_has_the_same_settings(gpt: Model) -> None:
    text = gpt.generate("the", json_schema=PERSON, max_new_tokens=90, seed=0)
    assert set(json.loads(text)) <= set(PERSON["properties"])
    assert gpt.generate("the", choices=["yes", "no"], min_tokens=None) in ("yes", "no")
    assert gpt.generate("the", temperature=0, max_new_tokens=4, logit_bias={70: 100.0}) == (
        gpt.tokenizer.decode([70] * 4)
    )
