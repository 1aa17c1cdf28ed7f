"""The server with real clients: openai, LangChain, LlamaIndex, LiteLLM, instructor, cohere,
openai-js.

    pytest -m heavy tests/server/test_clients.py

Each is skipped where its package is not installed; for JavaScript NODE_PATH says where it is.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, Field

from conftest import environment
from live_server import TEXTS, Live, bert_with, gpt_folder
from malmoi.inference import Model, load
from malmoi.tokenizer import Tokenizer, train_tokenizer

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore"),  # of packages that are not ours
]
WHY = "talks to the server with this client: pip install it"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


class Person(BaseModel):
    """A person."""

    name: str
    age: int = Field(ge=0, le=150)
    tags: list[str]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    size = dict(n_positions=4096, n_layer=1, n_embd=32, n_head=2)
    words = train_tokenizer(TEXTS, kind="wordpiece", vocab=120)
    gpt = load(gpt_folder(tmp_path_factory.mktemp("gpt") / "gpt", **size), device="cpu")
    known = gpt.tokenizer
    talking = Tokenizer(known._rust, known.settings | {"chat_template": TEMPLATE})
    models = {
        "gpt": gpt,
        "tools": Model(replace(gpt.checkpoint, tokenizer=talking)),
        "bert": bert_with(words, mlm=0),
        "cross": bert_with(words, ("LABEL_0",), classify=1),
    }
    with Live(models, slots=4, timeout=120) as server:
        yield server


@pytest.fixture
def url(live: Live) -> str:
    return f"{live.url}/v1"


def test_openai(url: str) -> None:
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    asked: Any = {"model": "gpt", "messages": [{"role": "user", "content": "hello"}], "seed": 1}
    whole = client.chat.completions.create(max_tokens=60, **asked)
    parts = client.chat.completions.create(max_tokens=60, stream=True, **asked)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert whole._request_id
    parsed = client.chat.completions.parse(response_format=Person, max_tokens=120, **asked)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError, match="has no chat template with tools"):
        client.chat.completions.create(tools=tools, tool_choice="required", **asked)
    done = client.chat.completions.create(
        tools=tools, tool_choice="required", **asked | {"model": "tools"}
    )
    assert done.choices[0].message.tool_calls[0].function.name == "f"
    assert len(client.embeddings.create(model="bert", input=["a", "the state"]).data) == 2


def test_langchain(url: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason=WHY)
    common = {"base_url": url, "api_key": "none", "max_retries": 0}
    chat = langchain.ChatOpenAI(model="gpt", max_tokens=120, seed=1, **common)
    text = chat.invoke("hello").content
    assert isinstance(text, str)
    assert "".join(chunk.content for chunk in chat.stream("hello")) == text
    assert len(chat.batch(["hello", "the"])) == 2
    for strict in (None, True):
        structured = chat.with_structured_output(Person, method="json_schema", strict=strict)
        assert isinstance(structured.invoke("who is it?"), Person)
    assert isinstance(
        chat.with_structured_output(None, method="json_mode").invoke("say JSON"), dict
    )
    calling = langchain.ChatOpenAI(model="tools", max_tokens=200, seed=1, **common)
    bound = calling.bind_tools([Person], tool_choice="any")
    done = bound.invoke("call it")
    (call,) = done.tool_calls
    assert call["name"] == "Person"
    Person.model_validate(call["args"])
    parts = list(bound.stream("call it"))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert [one["args"] for one in whole.tool_calls] == [call["args"]]
    messages = pytest.importorskip("langchain_core.messages", reason=WHY)
    answer = messages.ToolMessage("12", tool_call_id=call["id"])
    assert bound.invoke([("human", "call it"), done, answer]).tool_calls
    asked = calling.with_structured_output(Person, method="function_calling")
    assert isinstance(asked.invoke("who is it?"), Person)
    assert calling.bind_tools([Person]).invoke("maybe").response_metadata["finish_reason"]
    embed = langchain.OpenAIEmbeddings(model="bert", check_embedding_ctx_length=False, **common)
    texts = [f"the state {i}" for i in range(1000)]
    vectors = embed.embed_documents(texts)
    assert len(vectors) == 1000
    np.testing.assert_allclose(vectors[7], embed.embed_query(texts[7]), atol=1e-5)


def test_llama_index(url: str) -> None:
    models = pytest.importorskip("llama_index.llms.openai_like", reason=WHY)
    embeddings = pytest.importorskip("llama_index.embeddings.openai", reason=WHY)
    chat = pytest.importorskip("llama_index.core.llms", reason=WHY)
    common = {"api_base": url, "api_key": "none", "max_retries": 0}
    sizes = {"context_window": 4096, "max_tokens": 60, "is_chat_model": True}
    llm = models.OpenAILike(model="gpt", additional_kwargs={"seed": 1}, **sizes, **common)
    asked = [chat.ChatMessage(role="user", content="hello")]
    whole = llm.chat(asked).message.content
    assert "".join(one.delta or "" for one in llm.stream_chat(asked)) == whole
    assert llm.complete("the state").text is not None
    strict = models.OpenAILike(model="gpt", should_use_structured_outputs=True, **sizes, **common)
    found = strict.structured_predict(Person, _llama_prompt())
    assert isinstance(found, Person)
    embed = embeddings.OpenAIEmbedding(model_name="bert", **common)
    assert len(embed.get_text_embedding_batch(["the state", "a"] * 60)) == 120


def _llama_prompt() -> Any:
    prompts = pytest.importorskip("llama_index.core.prompts", reason=WHY)
    return prompts.PromptTemplate("who is it?")


def test_litellm(url: str) -> None:
    pytest.importorskip("mcp", reason="litellm imports it when it is given tools")
    with environment(LITELLM_LOCAL_MODEL_COST_MAP="True"):  # no download of prices
        litellm = pytest.importorskip("litellm", reason=WHY)
    common = {"api_base": url, "api_key": "none", "num_retries": 0}
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 120, **common}
    answer = litellm.completion(model="openai/gpt", seed=1, **asked)
    text = answer.choices[0].message.content
    parts = litellm.completion(model="openai/gpt", seed=1, stream=True, **asked)
    assert "".join(one.choices[0].delta.content or "" for one in parts) == text
    answer = litellm.completion(model="openai/gpt", response_format=Person, **asked)
    Person.model_validate_json(answer.choices[0].message.content)
    written = litellm.text_completion(
        model="text-completion-openai/gpt", prompt="the", max_tokens=4, **common
    )
    assert written.usage.completion_tokens == 4
    vectors = litellm.embedding(model="openai/bert", input=["a", "the state"], **common)
    assert len(vectors.data) == 2
    ranked = litellm.rerank(
        model="hosted_vllm/cross", query="the", documents=["a", "the state"], top_n=1, **common
    )
    assert len(ranked.results) == 1
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    done = litellm.completion(model="openai/tools", tools=tools, tool_choice="required", **asked)
    assert done.choices[0].message.tool_calls[0].function.name == "f"


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON"])
def test_instructor(url: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason=WHY)
    client = pytest.importorskip("openai").OpenAI(base_url=url, api_key="none", max_retries=0)
    made = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    ask = {"model": "tools", "messages": [{"role": "user", "content": "who?"}], "max_tokens": 200}
    if mode == "JSON":  # any object: the server is not told the schema
        with pytest.raises(Exception, match="name\\n  Field required"):
            made.create(response_model=Person, max_retries=0, **ask)
        return
    assert isinstance(made.create(response_model=Person, max_retries=0, **ask), Person)


def test_cohere(url: str) -> None:
    cohere = pytest.importorskip("cohere", reason=WHY)
    client = cohere.ClientV2(api_key="none", base_url=url.removesuffix("/v1"))
    found = client.rerank(model="cross", query="the", documents=["a", "the state"], top_n=1)
    assert len(found.results) == 1
    assert 0 < found.results[0].relevance_score < 1


SCRIPT = """
const OpenAI = require("openai");
const client = new OpenAI({ baseURL: process.argv[1], apiKey: "none", maxRetries: 0 });
(async () => {
  const messages = [{ role: "user", content: "hello" }];
  const ask = { model: "gpt", messages, max_tokens: 60, seed: 1 };
  const whole = await client.chat.completions.create(ask);
  let text = "";
  for await (const part of await client.chat.completions.create({ ...ask, stream: true }))
    text += part.choices[0]?.delta?.content ?? "";
  const schema = { type: "object", properties: { a: { type: "integer" } }, required: ["a"] };
  const response_format = { type: "json_schema", json_schema: { name: "a", schema } };
  const parsed = await client.chat.completions.parse({ ...ask, response_format });
  const vectors = await client.embeddings.create({ model: "bert", input: ["a", "the"] });
  let refused = "";
  try { await client.chat.completions.create({ ...ask, modalities: ["audio"] }); }
  catch (error) { refused = error.message; }
  console.log(JSON.stringify({
    whole: whole.choices[0].message.content, text, json: parsed.choices[0].message.content,
    vectors: vectors.data.length, refused, id: whole._request_id,
  }));
})();
"""


def test_openai_for_javascript(url: str) -> None:
    node = shutil.which("node")
    has = node and subprocess.run([node, "-e", 'require("openai")'], capture_output=True).returncode
    if has != 0:
        pytest.skip("needs node and the package openai: npm install openai, and NODE_PATH")
    done = subprocess.run(
        [str(node), "-e", SCRIPT, url], capture_output=True, text=True, check=True, timeout=120
    )
    said = json.loads(done.stdout)
    assert said["whole"] == said["text"]
    assert isinstance(json.loads(said["json"])["a"], int)
    assert said["vectors"] == 2
    assert "modalities is not offered" in said["refused"]
    assert said["id"].startswith("req_")
