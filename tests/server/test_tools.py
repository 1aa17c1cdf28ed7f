"""Function calling: forced and free calls, whole and streamed, in the formats of chat templates."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, strategies as st
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel

from live_server import Live, gpt_folder
from malmoi.inference import Model, load
from malmoi.server.api.tools import CallFormat, CallReader, Tool, ToolCallPart, call_format
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.chat_template import render_chat

TALK = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
ASKED = "assistant:"
# as Hermes and Qwen write calls, and as Llama 3 does
HERMES = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }} }\n'
    "</tool_call>{% endfor %}\n{% endfor %}assistant:"
)
LLAMA = (
    '{% if tools %}Answer with {"name": …, "parameters": …}.\n'
    "{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}{% endif %}" + TALK + ASKED
)
TEMPLATES = {"hermes": HERMES, "llama": LLAMA, "talks": TALK + ASKED, "plain": None}
WEATHER = {
    "name": "get_weather",
    "description": "The weather <now>.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
    },
}
TOOLS: Any = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "stop-now"}},
]
USER: Any = [{"role": "user", "content": "the state?"}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = gpt_folder(tmp_path_factory.mktemp("gpt") / "gpt", n_positions=1024, n_layer=1)
    gpt = load(folder, device="cpu")
    return {name: _with_template(gpt, text) for name, text in TEMPLATES.items()}


def _with_template(model: Model, template: str | None) -> Model:
    known = model.tokenizer
    tokenizer = Tokenizer(known._rust, known.settings | {"chat_template": template})
    return Model(replace(model.checkpoint, tokenizer=tokenizer))


@pytest.fixture(scope="module")
def live(models: dict[str, Model]) -> Iterator[Live]:
    with Live(models, slots=4, timeout=60) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def check_arguments(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"city", "days"}
    assert len(found["city"]) <= 6
    assert 1 <= found["days"] <= 9


@pytest.mark.parametrize("model", ["hermes", "llama"])
@pytest.mark.parametrize("seed", range(2))
def test_a_call_can_be_forced(client: openai.OpenAI, model: str, seed: int) -> None:
    ask: Any = {"model": model, "messages": USER, "tools": TOOLS, "seed": seed, "max_tokens": 120}
    whole = client.chat.completions.create(tool_choice=NAMED, **ask)
    (choice,) = whole.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "get_weather"
    check_arguments(call.function.arguments)
    with client.chat.completions.stream(tool_choice=NAMED, **ask) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert streamed.finish_reason == "tool_calls"
    (same,) = streamed.message.tool_calls or []
    assert same.function.arguments == call.function.arguments
    assert same.id != call.id
    any_of_them = client.chat.completions.create(tool_choice="required", n=2, **ask)
    for one in any_of_them.choices:
        assert one.message.tool_calls[0].function.name in ("get_weather", "stop-now")


def test_a_model_may_call_or_write(client: openai.OpenAI) -> None:
    for model in ("hermes", "llama"):
        for seed in range(3):
            ask: Any = {"model": model, "messages": USER, "tools": TOOLS, "seed": seed}
            message = client.chat.completions.create(max_tokens=30, **ask).choices[0].message
            parts = client.chat.completions.create(max_tokens=30, stream=True, **ask)
            text = "".join(part.choices[0].delta.content or "" for part in parts)
            assert text == (message.content or "")
            for call in message.tool_calls or []:
                json.loads(call.function.arguments)


def test_log_probabilities_of_a_call(client: openai.OpenAI) -> None:
    ask: Any = {"model": "hermes", "messages": USER, "tools": TOOLS, "tool_choice": NAMED}
    ask |= {"seed": 1, "logprobs": True, "max_tokens": 120}
    whole = client.chat.completions.create(**ask)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    parts = list(client.chat.completions.create(stream=True, **ask))
    named = [part.choices[0].logprobs for part in parts if part.choices[0].logprobs]
    tokens = [one.token for logprobs in named for one in logprobs.content]
    assert tokens == [one.token for one in whole.choices[0].logprobs.content]


def test_without_a_choice_tools_change_nothing(client: openai.OpenAI) -> None:
    for model in ("hermes", "talks"):
        ask: Any = {"model": model, "messages": USER, "temperature": 0, "max_tokens": 8}
        plain = client.chat.completions.create(**ask)
        same = client.chat.completions.create(tools=TOOLS, tool_choice="none", **ask)
        assert same.choices[0].message.content == plain.choices[0].message.content
        assert same.usage == plain.usage


class GetWeather(BaseModel):
    """The weather."""

    city: str
    days: int


def test_their_client_parses_arguments(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    done = client.chat.completions.parse(
        model="hermes", messages=USER, tools=[tool], tool_choice="required", max_tokens=120
    )
    assert isinstance(done.choices[0].message.tool_calls[0].function.parsed_arguments, GetWeather)


def test_the_template_sees_tools_calls_and_results(live: Live, models: dict[str, Model]) -> None:
    called = {"name": "get_weather", "arguments": '{"city": "서울", "days": 2}'}
    talk = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": called}
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12.5"},
    ]  # fmt: skip
    words = models["hermes"].tokenizer
    plain = [
        USER[0],
        {"role": "assistant", "content": "", "tool_calls": [
            {"function": called | {"arguments": {"city": "서울", "days": 2}}}
        ]},
        {"role": "tool", "content": "12.5"},
    ]  # fmt: skip
    text = render_chat(words, plain, tools=TOOLS)
    assert '"name": "get_weather", "arguments": {"city": "서울", "days": 2}' in text
    ask = {"model": "hermes", "messages": talk, "tools": TOOLS}
    done = httpx.post(f"{live.url}/v1/chat/completions", json=ask | {"max_tokens": 1}, timeout=60)
    read = words.encode(text, specials=False).tokens
    assert done.json()["usage"]["prompt_tokens"] == len(read)


@pytest.mark.parametrize(
    ("model", "asked", "param", "sentence"),
    [
        ("talks", {"tools": TOOLS}, "tools", "has no chat template with tools"),
        ("plain", {"tools": TOOLS}, "tools", "has no chat template with tools"),
        (
            "talks",
            {"messages": [*USER, {"role": "tool", "content": "3"}]},
            "messages",
            "has no chat template with tools",
        ),
        ("hermes", {"tool_choice": "required"}, "tool_choice", "that tools does not have"),
        (
            "hermes",
            {"tools": TOOLS[1:], "tool_choice": NAMED},
            "tool_choice",
            "that tools does not have",
        ),
        (
            "hermes",
            {"tools": TOOLS, "response_format": {"type": "json_object"}},
            None,
            "tools and response_format cannot be combined",
        ),
        (
            "hermes",
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools",
            "tools.0.function.name: String should match pattern",
        ),
        ("hermes", {"tools": [{"type": "custom"}]}, "tools", "tools.0.type: Input should be"),
        (
            "hermes",
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {
                "properties": {"x": {"type": "array", "uniqueItems": True}}
            }}}]},
            "tools",
            'Unimplemented keys: ["uniqueItems"]',
        ),
        (
            "hermes",
            {"tools": [{"type": "function", "function": {"name": "a", "description": "a" * 99999}}
            ]},
            None,
            "leaves no room in this model's context",
        ),
        (
            "hermes",
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "messages",
            "messages.0.function_call: Input should be None.",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(
    live: Live, model: str, asked: dict[str, Any], param: str | None, sentence: str
) -> None:
    body = {"model": model, "messages": USER} | asked
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert sentence in error["message"]
    assert error["param"] == param


FORMATS = {
    "hermes": CallFormat("<tool_call>", '\n{"name": "', "arguments", "}\n</tool_call>"),
    "llama": CallFormat('{"name"', ': "', "parameters", "}"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_says_how_calls_are_written(name: str, models: dict[str, Model]) -> None:
    assert call_format(models[name].tokenizer) == FORMATS[name]
    several = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": TEMPLATES[name]},
    ]
    known = models[name].tokenizer
    words = Tokenizer(known._rust, known.settings | {"chat_template": several})
    assert call_format(words) == FORMATS[name]
    assert render_chat(words, USER) == "the state?"
    assert "get_weather" in render_chat(words, USER, tools=TOOLS)
    assert call_format(models["talks"].tokenizer) is None
    assert call_format(models["plain"].tokenizer) is None


def written(form: CallFormat, arguments: str, name: str = "get_weather") -> str:
    return f"{form.trigger}{form.opening}{name}{form.middle}{arguments}{form.closing}"


def read_in_parts(form: CallFormat, texts: list[str]) -> tuple[str, list[tuple[str, str]], int]:
    """The text, and the name and arguments of each call, of a text that arrives in parts."""
    reader = CallReader(form)
    text = ""
    calls: list[list[str]] = []
    for i, part in enumerate(texts):
        for found in reader.read(part, last=i == len(texts) - 1):
            if isinstance(found, str):
                text += found
            elif found.function.name:
                calls.append([found.function.name, ""])
            else:
                assert isinstance(found, ToolCallPart)
                assert found.index == len(calls) - 1
                calls[-1][1] += found.function.arguments
    return text, [(name, arguments) for name, arguments in calls], reader.count


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_calls_are_found_however_a_text_is_cut(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    arguments = st.dictionaries(st.sampled_from(["a", "}", "<tool_call>"]), st.text(max_size=4))
    calls = data.draw(st.lists(arguments.map(json.dumps), max_size=3))
    start = data.draw(st.sampled_from(["", "Hm <tool", "\n", "{} <"]))
    text = start + "\n".join(written(form, one) for one in calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown = "" if calls and start.isspace() else start
    want = [("get_weather", one) for one in calls]
    assert read_in_parts(form, parts) == (shown, want, len(calls))


def test_a_call_that_is_cut_off_is_not_counted() -> None:
    form = FORMATS["hermes"]
    whole = written(form, '{"city": "x"}')
    assert read_in_parts(form, [whole[:9]]) == (whole[:9], [], 0)
    inside = whole.index('"x"')
    assert read_in_parts(form, [whole[:inside]]) == ("", [("get_weather", '{"city": ')], 0)


@pytest.mark.parametrize("name", FORMATS)
def test_only_right_calls_can_be_written(name: str) -> None:
    form = FORMATS[name]
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    right = written(form, '{"city": "x", "days": 2}')
    other = written(form, "{}", "stop-now")
    wrong = [
        written(form, '{"city": "x"}'),
        written(form, '{"city": "x", "days": 0}'),
        written(form, "{}", "other"),
        form.trigger,
        right[:-1],
    ]
    free = {"several": True, "forced": False}
    one = {"several": False, "forced": False}
    forced = {"several": True, "forced": True}
    for options, accepted, refused in (
        (free, ["", "Hi <tool", right, f"Hi\n{right}", right + other, f"{right} so"], wrong),
        (one, ["", "Hi", right, f"Hi\n{right}"], [*wrong, right + other]),
        (forced, [right, other], [*wrong, "", "Hi", f"Hi {right}", right + other]),
    ):
        grammar = form.grammar(tools, **options)
        assert all(accepts(grammar, text) for text in accepted)
        assert not any(accepts(grammar, text) for text in refused)


def accepts(grammar: str, text: str) -> bool:
    library = LLTokenizer("byte")
    matcher = LLMatcher(library, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = [*text.encode(), library.eos_token]
    return bool(matcher.validate_tokens(tokens) == len(tokens))
