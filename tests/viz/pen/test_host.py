"""HTML inside other pages: what the text itself must say. What a browser makes of it is measured in tests/browser."""

from __future__ import annotations

import re

from kvlab.viz.pen.host import document, scheme, view


def test_every_rule_of_a_view_stays_inside_it_and_weighs_more_than_classes() -> None:
    """Rests on CSS: an id in a selector, also one that is negated, weighs more than any number of classes."""
    text = view("mine", "<b>x</b>", rules="b,i{color:var(--kvlab-soft)}", label='"A" & B')
    style = re.search(r"<style>(.*)</style>", text, re.S).group(1)
    inside = re.sub(r"@supports [^{]*\{(.*?\})\}", r"\1", style, flags=re.S)
    for selectors in re.findall(r"([^{}]+)\{[^{}]*\}", inside):
        for one in re.split(r",(?![^(]*\))", selectors):
            assert re.search(r"\.kvlab-view(\.mine)?:not\(#_\)", one)
    assert ".kvlab-view.mine:not(#_) b,.kvlab-view.mine:not(#_) i{" in style
    assert 'class="kvlab-view mine"' in text
    assert 'aria-label="&quot;A&quot; &amp; B"' in text


def test_colours_have_a_value_where_a_browser_knows_no_colour_scheme() -> None:
    style = view("mine", "", rules="", label="Nothing")
    plain, following = style.split("@supports", 1)
    names = set(re.findall(r"--kvlab-(\w+):#", plain))
    assert names >= {"ink", "paper", "alarm", "soft", "rule"}
    assert set(re.findall(r"--kvlab-(\w+):light-dark\(#", following)) == names


def test_light_comes_after_dark() -> None:
    """A light page of high contrast in VS Code has the classes of both; of two equal rules the last one counts."""
    dark, light = scheme("p").splitlines()
    assert ".vscode-high-contrast p" in dark
    assert ".vscode-high-contrast-light p" in light


def test_a_page_needs_nothing_from_outside() -> None:
    text = document("<A>", "<p>B</p>")
    assert "<title>&lt;A&gt;</title>" in text
    assert "color-scheme" in text
    assert not re.search(r"(src|href)=|url\(|@import", text)
