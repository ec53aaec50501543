"""Pages taken apart, and facts of a run to make them from."""

import hashlib
import re
from base64 import b64encode
from html.parser import HTMLParser
from typing import Any

from lorad.cli.commands.report.facts import RunFacts
from lorad.records.runs import RunDetails
from lorad.records.samples import Sample
from lorad.tui.curves.series import Track

NASTY = {
    "script": "</pre></style></title></script><script>window.owned=1</script>",
    "handler": "<img src=x onerror='window.owned=1'><svg onload=window.owned=1><iframe src=//example.com>",
    "style": "<style>@import url(//example.com);body{display:none}</style><base href=//example.com>",
    "refresh": "<meta http-equiv=refresh content='0;url=//example.com'><form action=//example.com><input>",
    "quotes": "<!--<![CDATA[ &lt;script&gt; &#60;script&#62; \" onmouseover=\"owned=1 ' onfocus='owned=1",
    "control": "\x00\x1b]0;title\x07\x9b31m\u202ereversed\u2066\u200b\u2028\ud800\ufeff",
    "wide": "a\u0300" * 300 + "W" * 5000,
}


class Taken(HTMLParser):
    """A page's elements with their attributes, in order, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.said.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def texts(page: str) -> set[str]:
    return {text.strip() for text in Taken(page).said}


def refuse_loading(page: str) -> None:
    """Raise AssertionError where the page could load or run anything, or its own style does not apply."""
    taken = Taken(page)
    names = {name for name, _ in taken.elements}
    assert names <= {
        *("html", "head", "meta", "title", "style", "body", "main", "section", "article", "footer", "figure"),
        *(
            "h1",
            "h2",
            "h3",
            "h4",
            "p",
            "b",
            "div",
            "a",
            "ul",
            "li",
            "dl",
            "dt",
            "dd",
            "pre",
            "code",
            "details",
        ),
        *("summary", "table", "thead", "tbody", "tr", "th", "td"),
        *("svg", "g", "rect", "text", "line", "polyline"),
    }
    attributes = {(key, value) for _, about in taken.elements for key, value in about.items()}
    assert not {key for key, _ in attributes if key.startswith("on") or key in ("src", "style", "srcset")}
    assert all(re.fullmatch(r"#run-\d+", value or "") for key, value in attributes if key == "href")
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = (about["content"] for _, about in taken.elements if about.get("http-equiv"))
    assert f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'" == policy


def facts_of(run: RunDetails | None = None, **more: Any) -> RunFacts:
    return RunFacts(run or RunDetails("a", "ended"), Track(), **more)


def a_sample(text: str, **more: Any) -> Sample:
    known: dict[str, Any] = {"prompt": text, "completion": text, "answer": text, "reward": 1.0}
    return Sample(3, "a@2", text, 0, **known | more)
