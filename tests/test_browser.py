"""The helper itself finds what it is for: texts, console messages and requests."""

from tests.browser import needs_chromium, visit


@needs_chromium
def test_a_quiet_page_and_one_that_calls_out(tmp_path):
    quiet = tmp_path / "quiet.html"
    quiet.write_text(
        '<!doctype html><meta charset="utf-8"><p class="a b">one <b>tw\u00f6</b><br>3</p>'
        '<p class="a">x</p><p id="t"></p><script>'
        "setTimeout(() => {document.getElementById('t').textContent = location.hash}, 5000)"
        "</script>"
    )
    page = visit(quiet, fragment="t=1")
    assert page.texts("a") == ["one tw\u00f63", "x"] and '<p id="t">#t=1</p>' in page.dom
    assert page.errors == [] and page.requests == []
    loud = tmp_path / "loud.html"
    loud.write_text(
        '<!doctype html><img src="http://example.invalid/a.png">'
        "<script>console.error('said'); nothing.at.all</script>"
    )
    page = visit(loud)
    assert any("said" in message for message in page.errors)
    assert any("nothing is not defined" in message for message in page.errors)
    assert page.requests == ["http://example.invalid/a.png"]
