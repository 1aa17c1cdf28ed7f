"""A report as one HTML file that needs nothing else."""

import html
from collections.abc import Sequence

from malmoi.messages import Message, language, msg, translate
from malmoi.system.machine import this_machine

REPORT_STYLE = """
:root{color-scheme:light dark;--ink:#1d2433;--soft:#5f6879;--line:#e0e4ec;--paper:#fbfbfd;--card:#fff;
--a:#2458c5;--b:#b94a12;--c:#2b7a4b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9f0;--soft:#9aa3b6;--line:#2c3444;--paper:#12161e;--card:#1a202b;
--a:#7ea6ff;--b:#ff9e64;--c:#74cf98}}
body{font:16px/1.6 system-ui,"Noto Sans KR","NanumGothic","Apple SD Gothic Neo","Malgun Gothic",sans-serif;
word-break:keep-all;overflow-wrap:break-word;color:var(--ink);background:var(--paper);max-width:860px;margin:2.5rem auto;padding:0 1.2rem}
h1{font-size:1.75rem;line-height:1.25;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2.4rem 0 .7rem}
section{margin-top:2.8rem}section>h2{margin-bottom:.3rem}h3{font-size:1rem;font-weight:600;margin:1.5rem 0 .3rem}
.note{color:var(--soft);font-size:.9rem}.wide{overflow-x:auto}p.lead{color:var(--soft);margin:.2rem 0 1.2rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:.4rem .6rem;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500}.rows td:first-child{overflow-wrap:anywhere}
.facts{display:grid;grid-template-columns:repeat(var(--columns),1fr);gap:.7rem;margin:1.4rem 0 0}
@media(max-width:700px){.facts{--columns:2!important}}
.phone{display:none}@media(max-width:600px){.desktop{display:none}.phone{display:block}td,th{padding:.4rem .3rem}}
.facts div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.65rem .85rem}
.facts dt{color:var(--soft);font-size:.82rem}.facts dd{margin:0;font-size:1.2rem;font-variant-numeric:tabular-nums}
.pair{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:1rem 2rem}
svg{width:100%;height:auto;overflow:visible}svg text{fill:var(--soft);font-size:12px}
.bars{margin:.6rem 0 1.2rem}.bars .row{display:grid;grid-template-columns:minmax(8rem,17rem) 1fr 4rem;gap:.8rem;
align-items:center;padding:.16rem 0}.bars b{font-weight:500;font-variant-numeric:tabular-nums;text-align:right}
.bar{height:.7rem;border-radius:6px;background:color-mix(in srgb,var(--ink) 7%,transparent);overflow:hidden}
.bar i{display:block;height:100%;border-radius:6px;background:color-mix(in srgb,var(--soft) 60%,transparent)}
.bar.best i{background:var(--a)}.matrix td{text-align:right}
@media(max-width:600px){.bars .row{grid-template-columns:1fr 4rem;row-gap:.1rem}.bars .row span{grid-column:1/-1}
.rows tr{display:block;border-bottom:1px solid var(--line);padding:.5rem 0}.rows tr:first-child{display:none}
.rows td{display:inline;border:0;padding:0;color:var(--soft)}.rows td:first-child{display:block;color:var(--ink)}
.rows td:nth-last-child(2)::before{content:" → "}.rows td:last-child::before{content:"  "}}
summary{cursor:pointer;color:var(--soft)}pre,code{font:14px/1.5 ui-monospace,monospace}
pre{background:color-mix(in srgb,var(--ink) 5%,transparent);padding:.8rem 1rem;border-radius:8px;overflow:auto}
"""  # noqa: E501


def html_page(title: str, lead: str, body: str) -> str:
    """A whole page around some sections."""
    return (
        f'<!doctype html><html lang="{language()}"><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width">'
        f"<title>{words(title)}</title><style>{REPORT_STYLE}</style>"
        f'<h1>{words(title)}</h1><p class="lead">{words(lead)}</p>{body}</html>\n'
    )


def words(text: str) -> str:
    """A text of a page: in the user's language, and safe in HTML."""
    return html.escape(translate(text))


def heading(text: str) -> str:
    return f"<h2>{words(text)}</h2>"


def section(title: str, *parts: str) -> str:
    return f"<section>{heading(title)}{''.join(parts)}</section>"


def page_note(*sentences: str) -> str:
    """Sentences of a page, smaller than its text."""
    return f'<p class="note">{" ".join(words(text) for text in sentences)}</p>'


def fact_cards(pairs: Sequence[tuple[str, str]]) -> str:
    """Key figures as cards."""
    cards = "".join(f"<div><dt>{words(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in pairs)
    columns = len(pairs) if len(pairs) <= 7 else -(-len(pairs) // 2)
    return f'<dl class="facts" style="--columns:{columns}">{cards}</dl>'


def html_table(head: Sequence[str], rows: Sequence[Sequence[object]], kind: str = "") -> str:
    """A table; of `kind` "rows" it is a list of texts on a phone."""

    def cells(row: Sequence[object], tag: str) -> str:
        shown = (
            words(cell) if isinstance(cell, Message) else html.escape(str(cell)) for cell in row
        )
        return "".join(f"<{tag}>{cell}</{tag}>" for cell in shown)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    named = [translate(column) for column in head]
    return (
        f'<div class="wide"><table class="{kind}"><tr>{cells(named, "th")}</tr>{body}</table></div>'
    )


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def bars(values: Sequence[tuple[str, float]]) -> str:
    """Renders shares as horizontal bars out of 100%; the largest is coloured."""
    top = max((value for _, value in values), default=0.0)
    rows = []
    for name, value in values:
        kind = "bar best" if value == top else "bar"
        rows.append(
            f'<div class="row"><span>{html.escape(name)}</span><div class="{kind}">'
            f'<i style="width:{100 * value:.1f}%"></i></div><b>{value:.1%}</b></div>'
        )
    return f'<div class="bars">{"".join(rows)}</div>'


def machine_name() -> str:
    """The machine that a page was made on."""
    machine = this_machine()
    gpus = ", ".join(f"{gpu.count} × {gpu.name}" for gpu in machine.accelerators)
    return gpus or translate(
        msg("{architecture}, {cores} cores", architecture=machine.architecture, cores=machine.cores)
    )
