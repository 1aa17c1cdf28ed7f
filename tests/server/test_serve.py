"""The server says what the models say, in the form OpenAI's clients read, and bears whatever it
is sent.
"""

import base64
import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers as hf
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

import malmoi
from live_server import TEXTS, Live, bert_with, gpt_folder, slow_gpt, wait_until
from malmoi.errors import MalmoiError, UsageError
from malmoi.inference import Model, load
from malmoi.interpret.forward_pass import attention, lens
from malmoi.server.app import Server
from malmoi.server.config import ServeConfig
from malmoi.server.middleware import ServerState
from malmoi.server.model_registry import ModelRegistry, distinct_names
from malmoi.tokenizer import train_tokenizer

torch.set_num_threads(1)
PROMPT = "the state of"
KEY = "secret-key"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_folder(tmp_path_factory.mktemp("served") / "gpt")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Model]:
    pieces = train_tokenizer(TEXTS, kind="wordpiece", vocab=120)
    return {
        "gpt": load(folder, device="cpu"),
        "bert": bert_with(pieces, mlm=0),
        "moods": bert_with(pieces, ("good", "bad"), classify=2),
        "topics": bert_with(pieces, ("a", "b", "c"), "multi_label_classification", classify=3),
        "names": bert_with(pieces, ("O", "B-PER", "I-PER"), tag=3),
        "answers": bert_with(pieces, span=0),
    }


@pytest.fixture(scope="module")
def live(models: dict[str, Model]) -> Iterator[Live]:
    with Live(models, slots=8, queue=32, timeout=60, max_tokens=200, max_body=200_000) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60) as one:
        yield one


@pytest.fixture(scope="module")
def theirs(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_the_curl_lines_of_the_docs_run(client: httpx.Client) -> None:
    page = Path(__file__).parents[2] / "docs" / "ideas" / "serving.md"
    text = page.read_text("utf-8").replace("\\\n", " ")
    lines = re.findall(r"^curl .*", text, re.MULTILINE)
    assert len(lines) == 6
    for line in lines:
        words = shlex.split(line)
        path = next(word for word in words if "://" in word).partition(":8000")[2]
        given = dict(pairwise(words))
        name, _, value = given.get("-H", "Accept: */*").partition(": ")
        method = "POST" if "-d" in given else "GET"
        answer = client.request(method, path, content=given.get("-d"), headers={name: value})
        assert answer.status_code == 200, (line, answer.text)


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream, which ends with [DONE]."""
    lines = [line[len("data: ") :] for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_page_of_the_api_names_every_endpoint_and_loads_nothing(client: httpx.Client) -> None:
    page = client.get("/docs").text
    for path in client.get("/openapi.json").json()["paths"]:
        assert path.startswith("/studio") or f" {path}</h2>" in page
    assert "max_tokens" in page
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="', page)


def test_requests_cannot_write_control_tokens(
    client: httpx.Client, models: dict[str, Model]
) -> None:
    text = "the state<|endoftext|>of"
    words = models["gpt"].tokenizer
    tokens = words.encode(text).tokens
    assert words.specials.eos not in tokens
    done = post(client, "/v1/completions", model="gpt", prompt=text, max_tokens=1)
    assert done["usage"]["prompt_tokens"] == len(tokens)
    said = [{"role": "user", "content": text}]
    chat = post(client, "/v1/chat/completions", model="gpt", messages=said, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == len(words.encode(f"User: {text}\nAssistant:").tokens)
    masked = post(client, "/v1/embeddings", model="bert", input="the [MASK] of")
    assert (
        masked["usage"]["prompt_tokens"]
        == len(models["bert"].tokenizer.encode("the [MASK] of").tokens)
        > 5
    )


# ------------------------------------------------------------------ OpenAI's own client


def test_completions_are_what_generate_writes(
    theirs: openai.OpenAI, models: dict[str, Model]
) -> None:
    lm = models["gpt"]
    expected = lm.generate(
        [PROMPT, "나는"], max_new_tokens=12, seed=3, n=2, temperature=0.8, top_p=0.9
    )
    done = theirs.completions.create(
        model="gpt", prompt=[PROMPT, "나는"], max_tokens=12, seed=3, n=2, temperature=0.8, top_p=0.9
    )
    assert [choice.text for choice in done.choices] == [text for some in expected for text in some]
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.usage is not None
    assert done.usage.prompt_tokens == sum(
        len(lm.tokenizer.encode(text).tokens) for text in (PROMPT, "나는")
    )
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens


@pytest.mark.parametrize("tokens", [False, True])
def test_prompts_may_be_tokens(
    theirs: openai.OpenAI, models: dict[str, Model], tokens: bool
) -> None:
    prompt: Any = models["gpt"].tokenizer.encode(PROMPT).tokens if tokens else PROMPT
    one = theirs.completions.create(model="gpt", prompt=prompt, max_tokens=9, temperature=0)
    many = theirs.completions.create(
        model="gpt", prompt=[prompt, prompt], max_tokens=9, temperature=0
    )
    expected = models["gpt"].generate(PROMPT, max_new_tokens=9, temperature=0)
    assert {choice.text for choice in (*one.choices, *many.choices)} == {expected}


def test_a_stream_is_the_text_piece_by_piece(
    theirs: openai.OpenAI, models: dict[str, Model]
) -> None:
    stream = theirs.completions.create(
        model="gpt",
        prompt=PROMPT,
        max_tokens=20,
        seed=5,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, ends, usage = ["", ""], {}, None
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
    assert texts == models["gpt"].generate(PROMPT, max_new_tokens=20, seed=5, n=2)
    assert set(ends) == {0, 1}
    assert set(ends.values()) <= {"stop", "length"}
    assert usage is not None
    assert usage.completion_tokens <= 40


def test_stop_strings_end_a_text(theirs: openai.OpenAI, models: dict[str, Model]) -> None:
    whole = models["gpt"].generate(PROMPT, max_new_tokens=30, seed=1)
    stop = whole[5:7]
    done = theirs.completions.create(
        model="gpt", prompt=PROMPT, max_tokens=30, seed=1, stop=[stop, "never written"]
    )
    assert done.choices[0].text == whole[: whole.index(stop)]
    assert done.choices[0].finish_reason == "stop"


def test_echoed_logprobs_are_those_of_score(
    theirs: openai.OpenAI, models: dict[str, Model]
) -> None:
    lm = models["gpt"]
    done = theirs.completions.create(
        model="gpt", prompt=PROMPT + " the union", max_tokens=0, echo=True, logprobs=2
    )
    choice = done.choices[0]
    score = lm.score(PROMPT, " the union")
    assert choice.text == PROMPT + " the union"
    assert choice.logprobs is not None
    said = choice.logprobs.token_logprobs[-len(score.tokens) :]
    np.testing.assert_allclose(np.array(said, float), score.token_logprobs, atol=1e-4)
    assert choice.logprobs.token_logprobs[0] is None
    assert "".join(choice.logprobs.tokens) == choice.text
    starts = [
        choice.text.find(token, at)
        for token, at in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
    ]
    assert starts == choice.logprobs.text_offset
    assert done.usage is not None
    assert done.usage.completion_tokens == 0


def test_half_characters_are_named_as_bytes(
    theirs: openai.OpenAI, models: dict[str, Model]
) -> None:
    tokenizer = models["gpt"].tokenizer
    text = "뷁"
    done = theirs.completions.create(model="gpt", prompt=text, max_tokens=0, echo=True, logprobs=0)
    named = done.choices[0].logprobs
    assert named is not None
    spelled = "".join(named.tokens).replace("bytes:", "").replace("\\x", "")
    assert bytes.fromhex(spelled) == text.encode()
    assert len(named.tokens) == len(tokenizer.encode(text).tokens)


def test_chat_completions_continue_a_conversation(
    theirs: openai.OpenAI, models: dict[str, Model]
) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    expected = models["gpt"].chat(plain, max_new_tokens=15, seed=4)
    done = theirs.chat.completions.create(
        model="gpt",
        messages=messages,
        max_completion_tokens=15,
        seed=4,
        logprobs=True,
        top_logprobs=2,
    )
    assert done.choices[0].message.content is not None
    assert done.choices[0].message.content.strip() == expected
    assert done.choices[0].logprobs is not None
    first = done.choices[0].logprobs.content[0]  # type: ignore[index]
    assert len(first.top_logprobs) == 2
    stream = theirs.chat.completions.create(
        model="gpt", messages=messages, max_tokens=15, seed=4, stream=True
    )
    parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(parts) == done.choices[0].message.content


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings(client: httpx.Client, models: dict[str, Model], form: str) -> None:
    texts = ["the state", "하늘이 맑다"] * 20
    answer = post(
        client, "/v1/embeddings", model="bert", input=texts, encoding_format=form, layers=[-2, -1]
    )
    rows = [one["embedding"] for one in answer["data"]]
    if form == "base64":
        rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
    np.testing.assert_allclose(
        np.array(rows), models["bert"].embed(texts, layers=(-2, -1)), atol=1e-5
    )
    tokens = models["bert"].tokenizer.encode(texts[0]).tokens
    again = post(client, "/v1/embeddings", model="bert", input=tokens, layers=[-2, -1])
    np.testing.assert_allclose(
        again["data"][0]["embedding"], models["bert"].embed(texts[0], layers=(-2, -1)), atol=1e-5
    )


def test_embeddings_by_their_client(theirs: openai.OpenAI, models: dict[str, Model]) -> None:
    found = theirs.embeddings.create(model="bert", input="the union")
    np.testing.assert_allclose(
        found.data[0].embedding, models["bert"].embed("the union"), atol=1e-6
    )


def test_the_list_of_models(theirs: openai.OpenAI, models: dict[str, Model]) -> None:
    assert [model.id for model in theirs.models.list()] == list(models)
    assert theirs.models.retrieve("bert").id == "bert"
    with pytest.raises(openai.NotFoundError, match="Did you mean 'bert'"):
        theirs.models.retrieve("berd")


def test_lm_eval_works_as_a_client(live: Live, folder: Path, models: dict[str, Model]) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    judge = LocalCompletionsAPI(
        base_url=f"{live.url}/v1/completions",
        model="gpt",
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        max_length=90,
        batch_size=2,
        num_concurrent=1,
        max_retries=1,
    )
    pairs = [(PROMPT, " the union"), ("a small", " model"), ("나는 오늘", " 학교에")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = judge.loglikelihood(asked, disable_tqdm=True)
    expected = [models["gpt"].score(*pair) for pair in pairs]
    np.testing.assert_allclose(
        [one for one, _ in found], [score.logprob for score in expected], atol=1e-3
    )
    assert [bool(greedy) for _, greedy in found] == [score.greedy for score in expected]
    wished = Instance("generate_until", {}, (PROMPT, {"until": ["zzz"], "max_gen_toks": 8}), 0)
    text = judge.generate_until([wished], disable_tqdm=True)[0]
    assert text == models["gpt"].generate(PROMPT, max_new_tokens=8, temperature=0, stop=["zzz"])


# ------------------------------------------------------------------ what OpenAI does not have


def test_endpoints_of_encoders_and_fine_tuned_models(
    client: httpx.Client, models: dict[str, Model]
) -> None:
    text = "the [MASK] of the [MASK]"
    fills = post(client, "/v1/fill", model="bert", text=text, top=3)["fills"]
    assert fills == [
        [pytest.approx(vars(one)) for one in mask]
        for mask in models["bert"].fill_masks(text, top=3)
    ]
    label = post(client, "/v1/classify", model="moods", text=["the union", "no"])["data"]
    assert label == post(client, "/v1/classify", model="moods", input=["the union", "no"])["data"]
    assert [one["label"] for one in label] == [
        one.label for one in models["moods"].predict(["the union", "no"])
    ]
    pair = post(client, "/v1/classify", model="moods", text="the union", pair="is strong")["data"][
        0
    ]
    assert pair["scores"] == pytest.approx(
        models["moods"].predict(("the union", "is strong")).scores
    )
    several = post(client, "/v1/classify", model="topics", text=["the union", "no"])["data"]
    wanted = models["topics"].predict(["the union", "no"])
    assert [one["labels"] for one in several] == [list(one.labels) for one in wanted]
    assert several[0]["scores"] == pytest.approx(wanted[0].scores)
    assert "label" not in several[0]
    spans = post(client, "/v1/ner", model="names", text="the union is strong")["data"][0]
    assert [one["text"] for one in spans] == [
        one.text for one in models["names"].predict("the union is strong")
    ]
    answer = post(
        client,
        "/v1/answer",
        model="answers",
        question="what is strong",
        context="the union is strong",
    )
    expected = models["answers"].predict(("what is strong", "the union is strong"))
    assert (answer["answer"], answer["start"], answer["end"]) == (
        expected.text,
        expected.start,
        expected.end,
    )


def test_zero_shot_endpoints_of_language_models(
    client: httpx.Client, models: dict[str, Model]
) -> None:
    lm = models["gpt"]
    scores = post(client, "/v1/score", context=PROMPT, continuations=[" the union", " 하늘"])[
        "data"
    ]
    assert [one["logprob"] for one in scores] == pytest.approx(
        [one.logprob for one in lm.score(PROMPT, [" the union", " 하늘"])], abs=1e-4
    )
    label = post(client, "/v1/classify", text=PROMPT, labels=["yes", "no"])["data"][0]
    assert label["scores"] == pytest.approx(lm.classify(PROMPT, ["yes", "no"]).scores, abs=1e-4)
    answer = post(client, "/v1/answer", question="is it strong", context=PROMPT, max_tokens=8)
    assert answer["answer"] == lm.answer("is it strong", PROMPT, max_new_tokens=8)


@torch.inference_mode()
def test_attention_and_lens_are_those_of_transformers(
    folder: Path, models: dict[str, Model]
) -> None:
    model = models["gpt"]
    peer = hf.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.tensor([model.tokenizer.encode(PROMPT).tokens])
    theirs = peer(ids, output_attentions=True, output_hidden_states=True)
    seen = attention(model, PROMPT)
    expected = torch.stack(theirs.attentions)[:, 0]
    np.testing.assert_allclose(seen.weights, expected.numpy(), atol=2e-6)
    assert seen.words == [0, 1, 1, 2]
    states = [*map(peer.transformer.ln_f, theirs.hidden_states[:-1]), theirs.hidden_states[-1]]
    for layer, state in zip(lens(model, PROMPT, 3).guesses, states, strict=True):
        best = peer.lm_head(state)[0].softmax(-1).topk(3).values
        found = [[one.probability for one in place] for place in layer]
        np.testing.assert_allclose(np.array(found), best.numpy(), atol=1e-5)
    pair = attention(models["bert"], "the state", "the union")
    assert set(pair.segments) == {0, 1}
    np.testing.assert_allclose(pair.weights.sum(-1), 1, atol=1e-4)


def test_counts_for_prometheus(client: httpx.Client, live: Live) -> None:
    before = live.engine().stats().tokens
    post(client, "/v1/completions", prompt=PROMPT, max_tokens=3, temperature=0)
    text = client.get("/metrics").text
    assert re.search(r'malmoi_requests_total\{path="/v1/completions",status="200"\} \d+', text)
    assert f'vllm:generation_tokens_total{{model_name="gpt"}} {before + 3}' in text
    assert 'malmoi_request_seconds_count{path="/v1/completions"}' in text
    found = {
        what: float(re.search(rf'vllm:{what}_seconds_count\{{model_name="gpt"\}} (\d+)', text)[1])
        for what in (
            *("time_to_first_token", "request_queue_time"),
            *("inter_token_latency", "time_per_output_token"),
        )
    }
    assert found["time_to_first_token"] == found["request_queue_time"] > 0
    assert found["inter_token_latency"] == found["time_per_output_token"] >= 2
    ended = r'request_success_total\{model_name="gpt",finished_reason="length"\} [1-9]'
    assert re.search(ended, text)
    assert 'vllm:kv_cache_usage_perc{model_name="gpt"} 0' in text
    assert all(
        re.fullmatch(r"(# (HELP|TYPE) [\w:]+ .+)|([\w:]+(\{.+\})? [-+.\deInf]+)", line)
        for line in text.splitlines()
    )
    assert client.get("/health").json()["models"] == [one.name for one in live.registry]


def test_probes(client: httpx.Client) -> None:
    for method, path in (("HEAD", "/health"), ("GET", "/ping"), ("HEAD", "/ping")):
        answer = client.request(method, path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert client.get("/version").json() == {"version": malmoi.__version__}


def test_a_model_has_the_names_it_is_served_under(models: dict[str, Model]) -> None:
    one = [models["gpt"]]
    registry = ModelRegistry.open(one, ServeConfig(served_model_name=("gpt-4o", "mine")))
    try:
        assert list(registry.names) == ["gpt-4o", "mine"]
        assert registry.get("mine") is registry.get("gpt-4o") is registry.get(None)
        assert registry.get("mine").name == "gpt-4o"
        assert len(list(registry)) == 1
    finally:
        registry.close()
    for names in (("a",), ("a", "a"), ("a", "b", "c")):
        with pytest.raises(UsageError, match="names for 2 models"):
            ModelRegistry.open([*one, models["bert"]], ServeConfig(served_model_name=names))
    with pytest.raises(UsageError, match="Did you mean 'debug'"):
        ServeConfig(log_level="debg")


# ------------------------------------------------------------------ whatever it is sent

REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/completions", {"model": "gtp"}, 404, "Did you mean 'gpt'"),
    ("/v1/completions", {"model": "../../etc/passwd"}, 404, "There is no model"),
    ("/v1/completions", {"model": "bert"}, 400, "does not generate text. It can: fill"),
    ("/v1/completions", {"temprature": 1}, 400, "Did you mean 'temperature'"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": {}}, 400, "valid string; or: Input should be a valid list"),
    ("/v1/completions", {"prompt": [10**6]}, 400, "the vocabulary has"),
    ("/v1/completions", {"prompt": "a" * 5000}, 400, "leaves no room"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 100_000}, 400, "limit per request is 200"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    (
        "/v1/completions",
        {"prompt": "a", "temperature": 1e-300},
        400,
        "temperature must be 0 (greedy)",
    ),
    ("/v1/completions", {"prompt": "a", "repetition_penalty": 1e-300}, 400, "repetition_penalty"),
    ("/v1/completions", {"prompt": "a", "stop": ["x"] * 10_000}, 400, "stop"),
    ("/v1/completions", {"prompt": "a", "n": 128}, 400, "above the limit"),
    ("/v1/completions", {"prompt": "a", "seed": 2**80}, 400, "seed"),
    ("/v1/completions", {"prompt": "a", "frequency_penalty": 3}, 400, "frequency_penalty"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]},
        400,
        "tools.0.function: Field required.",
    ),
    (
        "/v1/embeddings",
        {"model": "bert", "input": "the " * 500},
        400,
        "more than this model's context",
    ),
    ("/v1/embeddings", {"model": "bert", "input": "a", "dimensions": 33}, 400, "32 dimensions"),
    ("/v1/fill", {"model": "gpt", "text": "a"}, 400, "cannot fill"),
    ("/v1/fill", {"model": "bert", "text": "a"}, 400, "nothing to fill"),
    ("/v1/ner", {"model": "gpt", "text": "a"}, 400, "fine-tuned for tagging"),
    ("/v1/classify", {"model": "names", "text": "a"}, 400, "send it to /v1/ner"),
    ("/v1/classify", {"model": "gpt", "text": "a"}, 400, "labels"),
    ("/studio/attention", {"model": "gpt", "text": "a", "pair": "b"}, 400, "one text at a time"),
    ("/studio/lens", {"model": "moods", "text": "a"}, 400, "no head over the vocabulary"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSED)
def test_errors_have_openais_format(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == status
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]


def test_errors_are_korean_where_the_request_asks_for_that(client: httpx.Client) -> None:
    wrong = {"model": "none", "prompt": "a"}
    said = client.post("/v1/completions", json=wrong, headers={"Accept-Language": "ko"}).json()
    assert said["error"]["message"].startswith("'none' 모델은 없습니다.")
    assert said["error"]["code"] == "model_not_found"
    said = client.post("/v1/completions", json=wrong).json()
    assert said["error"]["message"].startswith("There is no model 'none'.")


def test_errors_have_codes_for_programs(client: httpx.Client) -> None:
    def code(path: str, **body: Any) -> str | None:
        return client.post(path, json=body).json()["error"]["code"]

    assert code("/v1/completions", prompt="the " * 500) == "context_length_exceeded"  # OpenAI's own
    assert code("/v1/embeddings", model="bert", input="the " * 500) == "context_length_exceeded"
    assert code("/studio/attention", model="gpt", text="the " * 500) == "context_length_exceeded"
    assert code("/v1/fill", model="bert", text="a") == "no_mask"
    assert code("/v1/completions", model="none", prompt="a") == "model_not_found"


BROKEN = {
    "half a text": b'{"prompt": "a',
    "broken UTF-8": b'{"prompt": "\xff\xfe"}',
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a surrogate for a name": b'{"\\ud800": 1}',
    "a surrogate for a model": b'{"model": "\\ud800"}',
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "no end": b'{"prompt": "a", "temperature": Infinity}',
    "deep": b'{"prompt": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
    "a long number": b'{"prompt": "a", "seed": ' + b"9" * 9000 + b"}",
    "not an object": b"[1, 2]",
    "nothing": b"",
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_bodies_are_refused(client: httpx.Client, what: str) -> None:
    answer = client.post(
        "/v1/completions", content=BROKEN[what], headers={"Content-Type": "application/json"}
    )
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["message"]
    assert client.get("/health").status_code == 200


def test_large_bodies_are_refused_announced_or_not(client: httpx.Client) -> None:
    def slices() -> Iterator[bytes]:
        for _ in range(50):
            yield b"x" * 10_000

    for content in (b"x" * 500_000, slices()):
        answer = client.post(
            "/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    "path",
    ["/v1/none", "/../../pyproject.toml", "/%2e%2e/%2e%2e/pyproject.toml", "/v1/models/..%2fgpt"],
)
def test_unknown_addresses_are_404(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["/v1/moderations", "/v1/audio/speech", "/foo"])
def test_posts_to_unknown_addresses_are_404(client: httpx.Client, path: str) -> None:
    """Clients that look for an address fall back on 404, not on 405."""
    answer = client.post(path, json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert client.post("/").status_code == 405  # where the page is


def test_probes_may_ask_for_the_status_alone(client: httpx.Client) -> None:
    answer = client.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")


def test_requests_have_ids_and_a_line_in_the_log(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "malmoi.access")
    access = logging.getLogger("malmoi.access")
    access.addHandler(caplog.handler)
    mine = client.get("/v1/models", headers={"X-Request-Id": "mine-1"})
    assert mine.headers["x-request-id"] == "mine-1"
    forged = client.get("/v1/none?key=secret", headers={"X-Request-Id": "a b"})
    given = forged.headers["x-request-id"]
    assert re.fullmatch(r"req_[0-9a-f]{32}", given)
    client.get("/%0aforged%1b")
    try:
        assert wait_until(lambda: "GET /%0aforged%1b" in caplog.text)
    finally:
        access.removeHandler(caplog.handler)
    written = [one.getMessage() for one in caplog.records if one.name == access.name]
    lines = [re.sub(r"\d+\.\d{3}s", "…", line) for line in written]
    assert lines[0] == "127.0.0.1 GET /v1/models 200 … mine-1"
    assert lines[1] == f"127.0.0.1 GET /v1/none 404 … {given}"
    assert lines[2].startswith("127.0.0.1 GET /%0aforged%1b 404 … req_")


def test_a_form_post_of_another_site_is_refused(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/completions", content='{"prompt": "a"}', headers={"Content-Type": "text/plain"}
    )
    assert answer.status_code == 400
    assert client.get("/v1/completions").status_code == 405
    assert "page" not in client.get(
        "/health", headers={"Origin": "http://evil.example"}
    ).headers.get("access-control", "")
    assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403


def test_a_failing_request_does_not_affect_others(
    client: httpx.Client, models: dict[str, Model]
) -> None:
    def explode(*_: Any) -> None:
        raise RuntimeError("out of paper")

    hook = models["bert"].network.register_forward_pre_hook(explode)
    try:
        answer = client.post("/v1/fill", json={"model": "bert", "text": "the [MASK]"})
    finally:
        hook.remove()
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "paper" not in answer.text
    assert client.post("/v1/fill", json={"model": "bert", "text": "the [MASK]"}).status_code == 200


@pytest.mark.heavy
def test_responses_follow_the_openapi_schema(live: Live) -> None:
    check_specification(live, examples=3)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_many_responses_follow_the_openapi_schema(live: Live) -> None:
    check_specification(live, examples=150)


def check_specification(live: Live, examples: int) -> None:
    """Right and wrong requests drawn from the specification: no 5xx, and every answer is of the
    form it promises.
    """
    import schemathesis
    from schemathesis.generation import GenerationMode

    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    kept = [schemathesis.checks.CHECKS.get_one("response_schema_conformance")]
    asked = 0

    def ask(case: Any) -> None:
        nonlocal asked
        asked += 1
        answer = case.call()
        assert answer.status_code < 500, (case.as_curl_command(), answer.text)
        case.validate_response(answer, checks=kept)

    limits = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for result in schema.get_all_operations():
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            with suppress(Unsatisfiable):  # nothing can be wrong with an address that takes nothing
                limits(given(case=result.ok().as_strategy(generation_mode=mode))(ask))()
    assert asked >= 12 * examples


# ------------------------------------------------------------------ many, slow, impatient,
# unwelcome


def test_concurrent_requests_get_what_each_would_get_alone(
    client: httpx.Client, models: dict[str, Model]
) -> None:
    def ask(i: int) -> str:
        return post(client, "/v1/completions", prompt=PROMPT, max_tokens=5 + i % 7, seed=i)[
            "choices"
        ][0]["text"]

    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(ask, range(24)))
    assert found == [
        models["gpt"].generate(PROMPT, max_new_tokens=5 + i % 7, seed=i) for i in range(24)
    ]


@pytest.fixture
def slow(folder: Path) -> Iterator[Live]:
    with Live({"gpt": slow_gpt(folder, 0.05)}, slots=1, queue=1, max_tokens=90) as server:
        yield server


LONG = {"prompt": PROMPT, "max_tokens": 80, "temperature": 1.0, "seed": 0, "top_k": 20}


def test_a_disconnected_client_frees_its_slot(slow: Live) -> None:
    engine = slow.engine()
    with httpx.Client(base_url=slow.url) as client:
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            next(answer.iter_lines())
            assert engine.stats().running == 1
        assert wait_until(lambda: engine.stats().cancelled == 1)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=LONG, timeout=0.2)
        assert wait_until(lambda: engine.stats().cancelled == 2)
    assert engine.stats().running == 0


def test_a_full_queue_answers_429_with_retry_after(slow: Live) -> None:
    engine = slow.engine()
    with httpx.Client(base_url=slow.url, timeout=60) as client, ThreadPoolExecutor(2) as pool:
        running = pool.submit(client.post, "/v1/completions", json=LONG)
        assert wait_until(lambda: engine.stats().running == 1)
        waiting = pool.submit(client.post, "/v1/completions", json=LONG)
        assert wait_until(lambda: engine.stats().waiting == 1)
        third = client.post("/v1/completions", json=LONG)
        assert (third.status_code, third.json()["error"]["code"]) == (429, "busy")
        assert int(third.headers["Retry-After"]) > 0
        slow.server.stop(now=True)
        assert [running.result().status_code, waiting.result().status_code] == [503, 503]


def test_a_slow_request_times_out_with_504(folder: Path) -> None:
    """80 steps of 20 ms are more than half a second."""
    with Live({"gpt": slow_gpt(folder, 0.02)}, timeout=0.5) as server:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}
        ) as answer:
            said = events(answer)
        assert said[-1]["error"]["code"] == "timeout"
        whole = httpx.post(f"{server.url}/v1/completions", json=LONG)
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
        assert wait_until(lambda: server.engine().stats().cancelled == 2)


def test_a_graceful_stop_answers_everyone(slow: Live) -> None:
    """Requests in flight are answered; later ones are refused."""
    with httpx.Client(base_url=slow.url, timeout=60) as client, ThreadPoolExecutor(2) as pool:
        stream = pool.submit(
            lambda: events(
                client.post("/v1/completions", json={**LONG, "max_tokens": 20, "stream": True})
            )
        )
        assert wait_until(lambda: slow.engine().stats().running == 1)
        slow.server.stop()
        refused = client.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        assert stream.result()[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        slow.thread.join(10)
    assert not slow.thread.is_alive()


def test_an_immediate_stop_cancels_with_503(slow: Live) -> None:
    with httpx.Client(base_url=slow.url) as client, ThreadPoolExecutor(2) as pool:
        stream = pool.submit(
            lambda: events(client.post("/v1/completions", json={**LONG, "stream": True}))
        )
        # only then is there room to wait
        assert wait_until(lambda: slow.engine().stats().running == 1)
        whole = pool.submit(client.post, "/v1/completions", json=LONG)
        assert wait_until(lambda: (s := slow.engine().stats()).running + s.waiting == 2)
        slow.server.stop(now=True)
        assert stream.result()[-1]["error"]["code"] == "stopping"
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (
            503,
            "stopping",
        )


def test_slow_request_bodies_time_out(folder: Path) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    with (
        Live({"gpt": load(folder, device="cpu")}, body_timeout=0.3) as server,
        socket.create_connection(server.socket.getsockname()) as half_body,
        socket.create_connection(server.socket.getsockname()) as no_line,
    ):
        half_body.sendall(head)
        no_line.sendall(b"POST /v1/comp")
        for one in (half_body, no_line):
            one.settimeout(10)
        assert b"408" in half_body.recv(4096)
        assert no_line.recv(4096) == b""
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_connections_are_kept_longer_than_clients_keep_them(live: Live) -> None:
    """A server that hangs up first does so while the next request is on its way: an error that
    is nobody's fault.
    """
    # 60: nginx
    assert live.server.config.timeout_keep_alive > 60 > (httpx.Limits().keepalive_expiry or 0)


def test_clients_that_do_not_read_are_disconnected(folder: Path) -> None:
    """More than the sockets hold is written to a client that does not read: the request ends."""
    body = json.dumps({**LONG, "n": 64, "logprobs": 20, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    model = load(folder, device="cpu")
    with Live({"gpt": model}, timeout=1, stall_timeout=0.2) as server, socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(server.socket.getsockname())
        one.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert wait_until(lambda: server.app.state.gate.in_flight == 1)
        assert wait_until(lambda: server.app.state.gate.in_flight == 0)
        assert wait_until(lambda: server.engine().stats().running == 0)


def test_keys_origins_and_names(folder: Path) -> None:
    with Live(
        {"gpt": load(folder, device="cpu")}, api_key=KEY, cors=("http://page.example",)
    ) as server:
        with httpx.Client(base_url=server.url) as client:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": KEY},
                {"Authorization": "Bearer \xff"},
            ):
                sent = {name: value.encode("latin-1") for name, value in headers.items()}
                answer = client.get("/v1/models", headers=sent)
                assert (answer.status_code, answer.json()["error"]["type"]) == (
                    401,
                    "authentication_error",
                )
            assert client.get("/metrics").status_code == 401
            assert client.get("/health").status_code == 200
            asked = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
            allowed = client.options("/v1/completions", headers=asked)
            assert allowed.headers["access-control-allow-origin"] == "http://page.example"
            theirs_sends = {
                **asked,
                "Access-Control-Request-Headers": "authorization,x-stainless-lang,x-stainless-os",
            }
            assert client.options("/v1/completions", headers=theirs_sends).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as theirs:
            assert [model.id for model in theirs.models.list()] == ["gpt"]


def test_names_are_made_distinct_and_settings_are_checked() -> None:
    folders = [Path(one) for one in ("x/a", "x/b", "y/a", "y/a", "z/a", "y-a")]
    assert distinct_names(folders)[:5] == ["a", "b", "y-a", "y-a-2", "z-a"]
    assert len(set(distinct_names(folders))) == 6
    for wrong in (
        {"slots": 0},
        {"queue": -1},
        {"timeout": 0},
        {"port": 70_000},
        {"api_key": " "},
        {"api_key": "열쇠"},
    ):
        with pytest.raises(UsageError):
            ServeConfig(**wrong)  # type: ignore[arg-type]
    assert ServeConfig(host="::1").local
    assert not ServeConfig(host="0.0.0.0").local


# ------------------------------------------------------------------ the command


def test_the_command_serves_and_stops_in_order(folder: Path, tmp_path: Path) -> None:
    start = [sys.executable, "-c", "from malmoi.cli import main; main()", "serve", "--port", "0"]
    command = [*start, "--model", str(folder), "--model", str(folder)]
    child = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "MALMOI_API_KEY": KEY}
    )
    assert child.stderr is not None
    try:
        line = next(line for line in child.stderr if "http://" in line)
        url = re.findall(r"http://[\d.]+:\d+", line)[0]
        second = f"{folder.parent.name}-gpt"
        assert line.startswith(f"gpt, {second} at ")
        sent = {"Authorization": f"Bearer {KEY}"}
        body = {
            "model": second,
            "prompt": PROMPT,
            "max_tokens": 60,
            "top_k": 50,
            "seed": 0,
            "stream": True,
        }
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers=sent, timeout=30
        ) as answer:
            child.send_signal(signal.SIGTERM)
            assert events(answer)[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        assert child.wait(20) == 143
    finally:
        child.kill()
        child.stderr.close()


def test_a_stop_says_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    app.state.gate = ServerState(in_flight=2)
    with caplog.at_level("INFO", "malmoi"):
        Server(app, ServeConfig(timeout=9)).stop()
    said = "Finishing 2 requests first, for at most 9 s; Ctrl-C again stops at once."
    assert caplog.messages == [said]


def test_a_port_in_use_is_reported() -> None:
    from malmoi.server.app import listen

    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(MalmoiError, match="Choose another --port"),
    ):
        listen(ServeConfig(port=taken.getsockname()[1]))
