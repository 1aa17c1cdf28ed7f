"""Takes the pictures of docs/img: help and tables at 80 columns, pages on a desktop and a phone.

    python tools/pictures.py docs/img --demo demo --demo-ko demo-ko [--only help,run-ko…]
    python tools/pictures.py docs/img --studio http://127.0.0.1:8000 [--only studio-home…]

The folders are those that `malmoi demo` and `malmoi demo --language ko` leave, the address that of
`malmoi serve`. Needs playwright, pillow, chromium and a font with Hangul of two columns
(NanumGothicCoding).
"""

import argparse
import fcntl
import html
import os
import pty
import re
import shutil
import struct
import sys
import termios
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

MALMOI = [sys.executable, "-m", "malmoi"]
COLUMNS = 80
TABLES = {
    "help": ["--help"],
    "recipes": ["recipes"],
    "plan": ["plan", "gpt2-small", "--gpus", "8", "--gpu", "h100", "--price", "2.50"],
    "tasks": ["tasks"],
    "doctor": ["doctor"],
}
TASKS = {"en": "era", "ko": "order"}  # the demo's tasks
SECTIONS = {"run": 1, "finetune": 4}  # that are shown: what follows quotes the text
SCREENS = {"desktop": (1000, 2000), "phone": (390, 2000)}  # width and most of the height
PAIR = "model=malmoi-gpt&compare=malmoi-bert"
# width, height, address, and the answer that is chosen where it is a lesson
STUDIO = {
    "home": (1100, 1500, "home?model=malmoi-gpt&lang=en", ""),
    "lesson": (1100, 1400, "beside?lesson=3&place=4&lang=en", "bert"),
    "next": (1000, 1150, "next?temperature=0.6&topk=12&topp=0.8&lang=en", ""),
    "compare": (1100, 1500, f"attention?lesson=4&{PAIR}&reading=causal&lang=en", "most"),
    "beside": (1120, 1200, "beside?place=4&lang=ko&theme=dark", ""),
    "phone": (390, 1300, "home?model=malmoi-gpt&lang=ko&theme=dark", ""),
}
COLOURS = 256  # of a picture: with fewer, orange turns brown
# Hangul takes two columns in NanumGothicCoding, and so do its × and …; it has no lines for boxes
STYLE = f"""
@font-face {{ font-family: Lines; src: local("DejaVu Sans Mono"); size-adjust: 83%;
  unicode-range: U+D7, U+2026, U+2500-259F; }}
body {{ margin: 0 }}
pre {{ font: 15px/1.3 Lines, NanumGothicCoding, monospace; padding: 10px; margin: 0;
  width: {COLUMNS + 0.5}ch; white-space: pre-wrap }}
"""


def on_terminal(arguments: list[str], language: str) -> str:
    """What a command prints on a terminal of 80 columns, without colours."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"MALMOI_LANG": language, "TERM": "xterm", "NO_COLOR": "1"}
        os.execv(MALMOI[0], [*MALMOI, *arguments])  # noqa: S606
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    said = b""
    while True:
        try:
            said += os.read(terminal, 65_536)
        except OSError:  # the command has ended
            break
    os.waitpid(child, 0)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode("utf-8", "replace"))
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def pages(demo: Path, language: str) -> dict[str, Path]:
    """The demo's page, and those of its GPT's training and its fine-tuning."""
    folders = {"demo": demo, "run": demo / "gpt", "finetune": demo / TASKS[language]}
    return {name: folder / "report.html" for name, folder in folders.items()}


def save(picture: bytes, file: Path) -> None:
    image = Image.open(BytesIO(picture)).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file}: {image.width} × {image.height}, {file.stat().st_size / 1000:.0f} kB")


def picture_text(browser: Browser, text: str, file: Path) -> None:
    page = browser.new_page(viewport={"width": 760, "height": 100})
    page.set_content(f"<style>{STYLE}</style><pre>{html.escape(text)}</pre>")
    save(page.locator("pre").screenshot(), file)
    page.close()


def picture_page(browser: Browser, source: Path, screen: str, file: Path) -> None:
    """The top of a page, to the first section that quotes the text it is about."""
    width, most = SCREENS[screen]
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(source.resolve().as_uri())
    wide, tall = page.evaluate("[document.documentElement.scrollWidth, document.body.scrollHeight]")
    if wide > width:
        print(f"{file} is {wide} pixels wide, more than its screen of {width}.", file=sys.stderr)
    heading = page.locator("h2").nth(SECTIONS.get(file.name.split("-")[0], 99))
    end = heading.bounding_box() if heading.count() else None
    height = min(most, tall if end is None else end["y"])
    clip = {"x": 0, "y": 0, "width": width, "height": height}
    save(page.screenshot(full_page=True, clip=clip), file)  # type: ignore[arg-type]
    page.close()


def picture_studio(browser: Browser, studio: str, name: str, file: Path) -> None:
    """The top of a view, once it is computed, or of a lesson once it is answered."""
    width, height, address, option = STUDIO[name]
    page = browser.new_page(viewport={"width": width, "height": height}, reduced_motion="reduce")
    page.goto(f"{studio}/#/{address}")
    page.locator("#status", has_text=re.compile("Done in|걸렸습니다")).wait_for()
    if option:
        page.locator(f"[data-option={option}]").click()
        page.locator(".verdict").wait_for()
    save(page.screenshot(), file)
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--demo", type=Path)
    parser.add_argument("--demo-ko", type=Path)
    parser.add_argument("--studio", help="address of malmoi serve")
    parser.add_argument("--only", default="", help="names such as help or run-ko, with commas")
    given = parser.parse_args()
    wanted = [name for name in given.only.split(",") if name]
    with sync_playwright() as started:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in STUDIO if given.studio else ():
            if not wanted or f"studio-{name}" in wanted:
                picture_studio(browser, given.studio, name, given.out / f"studio-{name}.png")
        demos = (("en", given.demo), ("ko", given.demo_ko))
        for language, demo in ((language, demo) for language, demo in demos if demo):
            for name, arguments in TABLES.items():
                if not wanted or {name, f"{name}-{language}"} & set(wanted):
                    text = on_terminal(arguments, language)
                    picture_text(browser, text, given.out / f"{name}-{language}.png")
            for name, page in pages(demo, language).items():
                for screen in SCREENS:
                    if not wanted or {name, f"{name}-{language}"} & set(wanted):
                        file = given.out / f"{name}-{language}-{screen}.png"
                        picture_page(browser, page, screen, file)
        browser.close()


if __name__ == "__main__":
    main()
