"""A report as one HTML file that needs nothing else."""

import html
from collections.abc import Sequence

from malmoi.system.language import language, translate

REPORT_STYLE = """
:root{color-scheme:light dark;--ink:#1d2433;--soft:#5f6879;--line:#e0e4ec;--paper:#fbfbfd;--card:#fff;
--a:#2458c5;--b:#b94a12;--c:#2b7a4b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9f0;--soft:#9aa3b6;--line:#2c3444;--paper:#12161e;--card:#1a202b;
--a:#7ea6ff;--b:#ff9e64;--c:#74cf98}}
body{font:16px/1.6 system-ui,"Noto Sans KR","NanumGothic","Apple SD Gothic Neo","Malgun Gothic",sans-serif;
color:var(--ink);background:var(--paper);max-width:860px;margin:2.5rem auto;padding:0 1.2rem}
h1{font-size:1.75rem;line-height:1.25;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2.4rem 0 .7rem}
.wide{overflow-x:auto}p.lead{color:var(--soft);margin:.2rem 0 1.2rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:.4rem .6rem;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500}
.facts{display:grid;grid-template-columns:repeat(var(--columns),1fr);gap:.7rem;margin:1.4rem 0 0}
@media(max-width:700px){.facts{--columns:2!important}}
@media(max-width:600px){svg[viewBox^="0 0 820"] text{font-size:22px}}
.facts div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.65rem .85rem}
.facts dt{color:var(--soft);font-size:.82rem}.facts dd{margin:0;font-size:1.2rem;font-variant-numeric:tabular-nums}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:1rem 2rem}
svg{width:100%;height:auto;overflow:visible}svg text{fill:var(--soft);font-size:12px}
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


def fact_cards(pairs: Sequence[tuple[str, str]]) -> str:
    """Numbers worth a glance, as cards."""
    cards = "".join(f"<div><dt>{words(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in pairs)
    columns = len(pairs) if len(pairs) <= 7 else -(-len(pairs) // 2)
    return f'<dl class="facts" style="--columns:{columns}">{cards}</dl>'


def html_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def cells(row: Sequence[object], kind: str) -> str:
        return "".join(f"<{kind}>{html.escape(str(cell))}</{kind}>" for cell in row)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    named = [translate(column) for column in head]
    return f'<div class="wide"><table><tr>{cells(named, "th")}</tr>{body}</table></div>'
