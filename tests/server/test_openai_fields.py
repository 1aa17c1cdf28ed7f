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
from malmoi.checkpoint.folder import SentencePooling
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
        {"store": False, "service_tier": "auto", "metadata": {"a": "b"}},
        {"response_format": {"type": "text"}, "logit_bias": {}},
        {"temperature": None, "n": None, "stream": None, "stop": None, "tools": None},
        {"reasoning_effort": "none", "verbosity": "medium", "use_beam_search": False},
        {"max_tokens": None, "max_completion_tokens": 5, "stop_token_ids": []},
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
            {"tool_choice": "required", "tools": [{"type": "function"}]},
            "tools is not offered by this server: omit it.",
        ),
        ({"store": True}, "store is not offered by this server: omit it."),
        ({"reasoning_effort": "high"}, "reasoning_effort is not offered"),
        ({"messages": [*USER, {"role": "tool", "content": "3"}]}, "tools are not offered"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages: tools are not offered by this server, so omit the messages that use them.",
        ),
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


def test_responses_are_those_of_the_chat(client: openai.OpenAI) -> None:
    ask = {"model": "gpt", "temperature": 0, "max_output_tokens": 9}
    system = [{"role": "system", "content": "be kind"}]
    chat = client.chat.completions.create(
        model="gpt", messages=system + USER, temperature=0, max_tokens=9
    )
    whole = client.responses.create(instructions="be kind", input="hello", **ask)
    said = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    same = client.responses.create(input=system + said, **ask)
    assert whole.output_text == same.output_text == chat.choices[0].message.content
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with client.responses.stream(instructions="be kind", input="hello", **ask) as stream:
        events = list(stream)
    texts = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert [one.sequence_number for one in events] == list(range(len(events)))
    form = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    found = client.responses.create(
        model="gpt", input="hello", text=form, max_output_tokens=80, store=False
    )
    assert found.status == "completed"
    assert isinstance(json.loads(found.output_text)["age"], int)
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not offered"):
        client.responses.create(model="gpt", input="hello", previous_response_id="resp_1")


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


def test_only_a_cross_encoder_ranks(live: Live) -> None:
    ask = {"model": "bert", "query": "a", "documents": ["b"]}
    answer = httpx.post(f"{live.url}/v1/rerank", json=ask, timeout=60)
    assert answer.status_code == 400
    assert "is not a cross-encoder" in answer.json()["error"]["message"]


def test_python_has_the_same_settings(gpt: Model) -> None:
    text = gpt.generate("the", json_schema=PERSON, max_new_tokens=90, seed=0)
    assert set(json.loads(text)) <= set(PERSON["properties"])
    assert gpt.generate("the", choices=["yes", "no"], min_tokens=None) in ("yes", "no")
    assert gpt.generate("the", temperature=0, max_new_tokens=4, logit_bias={70: 100.0}) == (
        gpt.tokenizer.decode([70] * 4)
    )
