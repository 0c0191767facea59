"""The report: true, complete, harmless whatever a candidate wrote, usable in a real browser, on a phone, by keys."""

import json
import re
import struct
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import hostile
import pytest
from browser import opened
from workspaces import ENVIRONMENT, drive, kernel, make_workspace, start

from agent.journal import Journal
from agent.morning import page
from agent.morning.cards import fitting
from agent.morning.charts import log_ticks, nice_ticks
from agent.morning.diff import MAX_LINES, diff_lines
from agent.morning.headline import Belief, headline
from agent.morning.markdown import markdown
from agent.morning.night import read_night
from agent.morning.picture import picture
from agent.morning.summary import costs, failures, machine_events, next_steps, target_lines
from agent.places import SessionPlaces
from agent.visible import excerpt, markdown_text, one_line, visible

ROOT = Path(__file__).resolve().parent.parent


def overnight(folder, *arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "agent"), *arguments],
        cwd=folder, capture_output=True, text=True, env=ENVIRONMENT, timeout=60,
    )  # fmt: skip


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A workspace with a finished session full of hostile text, and its report."""
    workspace = hostile.make_session(tmp_path_factory.mktemp("morning") / "workspace")
    done = overnight(workspace, "report", "--json")
    assert done.returncode == 0, done.stderr
    return workspace, json.loads(done.stdout)


@pytest.fixture
def night(session):
    return read_night(SessionPlaces(session[0], "night"))


@pytest.fixture
def address(session):
    return Path(session[1]["page"]).as_uri()


# What it says


def test_report_writes_three_files_and_says_the_same_as_json(session):
    workspace, report = session
    folder = workspace / ".overnight/night"
    assert [Path(report[key]) for key in ("report", "picture", "page")] == [
        folder / "report.md", folder / "progress.png", folder / "report.html",
    ]  # fmt: skip
    assert report["headline"]["belief"] == "faster"
    assert report["headline"]["against"] == "torch.compile"
    assert report["headline"]["gain"]["low"] < 1 / 0.9**2 < report["headline"]["gain"]["high"]
    assert {one["status"]: one["count"] for one in report["failures"]} == {
        "incorrect": 1,
        "crash": 1,
        "invalid_reply": 1,
    }
    assert [one["command"] for one in report["next"]] == [
        "git log -p overnight/night",
        "overnight apply night",
        "overnight export night-kernels --session night",
        "overnight resume night",
    ]
    assert list(folder.glob("*.part")) == []


def test_reading_a_session_changes_none_of_its_files(session):
    folder = session[0] / ".overnight/night"
    before = {name: (folder / name).read_bytes() for name in ("journal.sqlite", "profile.json", "verify.json", "lock")}
    read_night(SessionPlaces(session[0], "night"))
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_shares_after_are_those_before_divided_by_what_was_gained(night):
    lines = {one.target.id: one for one in target_lines(night)}
    assert lines["rmsnorm_a"].gain == pytest.approx(1.5 * 1.2)
    assert lines["rmsnorm_a"].kept == 2
    left = {"rmsnorm_a": 0.4 / 1.8, "softmax_b": 0.3 / 1.3}
    total = 1 - (0.7 - sum(left.values()))
    assert {name: one.share_after for name, one in lines.items()} == pytest.approx(
        {name: share / total for name, share in left.items()}
    )


def test_a_kernel_grows_out_of_the_one_that_it_had_to_beat(night):
    assert [night.trial(number).parent for number in (1, 2, 7)] == [None, 1, 2]
    assert [one.number for one in night.lineage(night.trial(7))] == [1, 2]
    assert [night.trial(number).rival for number in (1, 2, 7)] == [None, 1, 2]


def test_lineage_follows_what_a_kernel_was_made_from_where_its_proposer_says_so(night):
    last = night.trial(7)
    candidate = replace(last.experiment.candidate, parents=(6, 1))
    merged = replace(last, experiment=replace(last.experiment, candidate=candidate))
    changed = replace(night, trials=(*night.trials[:6], merged))
    assert (merged.rival, merged.parent, merged.made_from) == (2, 6, (6, 1))
    assert [one.number for one in changed.lineage(merged)] == [6]
    circular = replace(merged, experiment=replace(merged.experiment, candidate=replace(candidate, parents=(7,))))
    assert len(replace(night, trials=(*night.trials[:6], circular)).lineage(circular)) <= 1


def test_failures_name_their_stage_and_cost_its_proposer(night):
    assert {(one.status, one.where, one.count) for one in failures(night)} == {
        ("incorrect", "shapes", 1), ("crash", "shapes", 1), ("invalid_reply", "", 1),
    }  # fmt: skip
    (line,) = costs(night)
    assert (line.proposer, line.experiments, line.kept, line.dollars) == ("replay", 7, 3, 0.0)


@pytest.mark.parametrize(
    ("recordings", "belief", "words"),
    [
        ({"0001_rmsnorm_a__x.py": kernel("incorrect")}, Belief.NOTHING, "Nothing was kept"),
        ({"0001_rmsnorm_a__x.py": kernel("keep 1.5", "# model: 0.99999")}, Belief.NOT_FASTER, "not measurably faster"),
        ({"0001_rmsnorm_a__x.py": kernel("keep 1.5")}, Belief.FASTER, "1.11 times as fast as torch.compile"),
    ],
)
def test_the_headline_claims_what_the_interval_allows_and_no_more(tmp_path, recordings, belief, words):
    workspace = make_workspace(tmp_path, recordings=recordings)
    drive(workspace, "run")
    top = headline(read_night(SessionPlaces(workspace, "night")))
    assert top.belief is belief
    assert words in top.sentence


@pytest.mark.slow
def test_a_night_lost_to_the_machine_says_so_and_parked_targets_why(tmp_path):
    recordings = {
        "0001_rmsnorm_a__x.py": kernel("unreliable", name="x"),
        "0002_rmsnorm_a__y.py": kernel("environment", name="y"),
        "0003_softmax_b__z.py": kernel("incorrect"),
    }
    workspace = make_workspace(tmp_path, recordings=recordings)
    drive(workspace, "run")
    night = read_night(SessionPlaces(workspace, "night"))
    assert headline(night).caveats == ("2 of 3 experiments were lost to the machine, which failed or was too busy",)
    states = {one.target.id: one.state for one in target_lines(night)}
    assert states["rmsnorm_a"].startswith("parked: scripted environment")
    assert night.model == "model.py:Net"


def test_a_broken_or_outdated_verification_is_said_before_anything_else(session, tmp_path):
    import os
    import shutil

    workspace = shutil.copytree(session[0], tmp_path / "copy", symlinks=True)
    places = SessionPlaces(workspace, "night")
    path = places.folder / "verify.json"
    os.utime(path, (1e9, 1e9))
    assert "kept after this was measured" in headline(read_night(places)).caveats[0]
    path.write_text(path.read_text().replace('"outputs_ok": true', '"outputs_ok": false'))
    top = headline(read_night(places))
    assert top.belief is Belief.BROKEN
    assert top.sentence.startswith("Do not use it")
    assert any(step.command.endswith("--bisect") for step in next_steps(read_night(places)))
    path.write_text("{}")
    damaged = overnight(workspace, "report")
    assert damaged.returncode == 3
    assert "make it anew with `overnight verify night`" in damaged.stderr
    path.unlink()
    top = headline(read_night(places))
    assert top.belief is Belief.UNVERIFIED
    assert "overnight verify night" in top.caveats[0]
    places.profile.unlink()
    assert target_lines(read_night(places)) == ()
    assert "experiment" in markdown(read_night(places))
    assert page.report_page(read_night(places)).startswith("<!doctype html>")


def test_machine_events_tell_starts_interruptions_and_what_the_session_said(tmp_path):
    workspace = make_workspace(tmp_path, recordings={"0001_rmsnorm_a__slow.py": kernel("keep", "# slow: 2")})
    process = start(workspace, "run")
    until = time.monotonic() + 15
    while not (workspace / ".overnight/night/judged.txt").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    with closing(Journal(workspace / ".overnight/night/journal.sqlite")) as journal:
        journal.event("GPU-1 was throttled: too hot")
    drive(workspace, "resume")
    told = [one.what for one in machine_events(read_night(SessionPlaces(workspace, "night")))]
    assert told.index("started") < told.index("resumed")
    assert any(words.startswith("experiment 1: cut off") for words in told)
    assert any(words.startswith("the supervisor before") for words in told)
    assert "GPU-1 was throttled: too hot" in told
    assert told[-1].startswith("the kept kernels")
    assert not any(words.startswith("measuring the model") for words in told)


# Harmless


def test_a_terminal_is_not_commanded_by_what_a_candidate_wrote(session, capsys):
    from agent.progress import Progress

    Progress().say(f"   1  keep  {hostile.EVERYTHING}")
    printed = capsys.readouterr().out
    assert "[U+001B]" in printed
    for command in ("report", "results", "status", "logs"):
        printed += overnight(session[0], command).stdout
    assert "\x1b" not in printed
    assert "\u202e" not in printed


def test_hidden_characters_are_written_out():
    assert visible("a\x1b[2J\u202eb\x00\r\nc\td") == "a[U+001B][2J[U+202E]b[U+0000]\nc\td"
    assert visible("\ud800").encode() == b"[U+D800]"
    assert one_line("x\n" * 400, 10) == "x x x x x…"
    assert excerpt("abcdef", 4) == "abcd\n… cut here: 2 more characters"


def test_markdown_of_candidates_is_text_only(session, night):
    text = markdown(night)
    assert text == Path(session[1]["report"]).read_text()
    for harmful in ("<script", "<img", "<svg", "\x1b", "\u202e", "://evil"):
        assert harmful not in text
    assert re.search(r"(?<!\\)\]\(", text) is None
    assert markdown_text("![x](http://e/) #1 &lt;") == "\\!\\[x\\](http&#58;//e/) \\#1 &amp;lt;"


def test_every_row_of_the_markdown_has_the_columns_of_its_table(night):
    wide = None
    for line in markdown(night).splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line))
        if not line.startswith("|"):
            wide = None
        elif wide is None:
            wide = cells
        else:
            assert cells == wide, line


def test_the_picture_is_a_png_whatever_a_candidate_is_called(night):
    content = picture(night)
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1600, 1000)


def test_nothing_that_a_candidate_wrote_runs_loads_or_becomes_an_element(chromium, address):
    with opened(chromium, address) as watched:
        tab = watched.page
        tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert tab.title().startswith("night: The model runs")
        for selector in ("img", "iframe", "[onload]", "[onerror]", "a[href^=javascript]", "a[href^=http]", "textarea"):
            assert tab.locator(selector).count() == 0, selector
        assert tab.locator("script").count() == 1
        assert hostile.SCRIPT in tab.locator("#experiment-1 pre").first.inner_text()
        assert "49" not in tab.locator("#experiment-4 .words").inner_text()
        assert tab.locator("[style]").count() == 0
        watched.fine(allowed=address)


def test_markup_that_slipped_through_could_neither_run_nor_load(chromium, session, tmp_path):
    holed = tmp_path / "holed.html"
    text = Path(session[1]["page"]).read_text()
    harm = "<script>window.owned = 1</script><img src=http://127.0.0.1:9/x.png onerror='window.owned = 2'>"
    holed.write_text(text.replace("<main", harm + "<main", 1))
    with opened(chromium, holed.as_uri()) as watched:
        assert watched.page.evaluate("window.owned") is None
        assert any("Content Security Policy" in one for one in watched.complaints)


# Usable


def test_a_diff_is_opened_by_keyboard_alone(chromium, address):
    with opened(chromium, address) as watched:
        tab = watched.page
        first = tab.locator("#experiment-1 summary").first
        first.focus()
        tab.keyboard.press("j")
        tab.keyboard.press("Enter")
        diff = tab.locator("#experiment-2 pre.diff")
        assert diff.is_visible()
        added = diff.locator(".add").all_inner_texts()
        assert any("'vectorised'" in line for line in added)
        assert tab.locator("#experiment-2 svg.strip circle").count() == 21
        tab.keyboard.press("k")
        tab.keyboard.press("Enter")
        assert tab.locator("#experiment-1 pre").first.is_visible()
        watched.fine(allowed=address)


def test_the_list_is_filtered_and_a_link_opens_its_experiment(chromium, address):
    with opened(chromium, address) as watched:
        tab = watched.page
        tab.get_by_label("Text").fill("ONLINE")
        assert tab.locator("ol.experiments > li:visible").count() == 1
        assert tab.locator("output").inner_text() == "1 of 7 shown"
        tab.get_by_label("Text").fill("")
        tab.get_by_label("Status").select_option("crash")
        assert tab.locator("ol.experiments > li:visible").get_attribute("id") == "experiment-7"
        tab.get_by_label("Status").select_option("")
        tab.locator("#failures ~ .scroll a").first.click()
        number = re.search(r"#(experiment-\d)$", tab.url)[1]
        assert tab.locator(f"#{number} .body").is_visible()
        watched.fine(allowed=address)


def test_it_is_complete_without_script(chromium, address):
    with opened(chromium, address, java_script_enabled=False) as watched:
        tab = watched.page
        assert tab.locator("form.filters").is_hidden()
        tab.locator("#experiment-2 summary").first.click()
        assert tab.locator("#experiment-2 pre.diff").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_its_text_stands_out_in_light_and_dark(chromium, address, scheme):
    with opened(chromium, address, viewport={"width": 360, "height": 740}, color_scheme=scheme) as watched:
        tab = watched.page
        tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        names = ("ink", "soft", "accent", "good", "bad", "warn")
        read = "name => getComputedStyle(document.documentElement).getPropertyValue('--' + name)"
        colours = {name: tab.evaluate(read, name).strip() for name in (*names, "bg", "panel")}
        for name in names:
            assert min(contrast(colours[name], colours[back]) for back in ("bg", "panel")) >= 4.5, name
        shown = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert shown == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]


def contrast(first, second):
    """WCAG 2.2's ratio of relative luminances."""
    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_screen_reader_finds_landmarks_headings_in_order_and_names(chromium, address):
    with opened(chromium, address) as watched:
        tab = watched.page
        assert [tab.locator(one).count() for one in ("h1", "main", "nav[aria-label]", "footer")] == [1, 1, 1, 1]
        levels = [int(one[1]) for one in tab.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => h.tagName)")]
        assert all(after <= before + 1 for before, after in pairwise(levels))
        unnamed = "[...document.querySelectorAll('{}')].filter(one => !({})).length"
        assert tab.evaluate(unnamed.format("th", "one.scope")) == 0
        assert (
            tab.evaluate(
                unnamed.format("svg[role=img]", "one.getAttribute('aria-label') || one.querySelector('title')")
            )
            == 0
        )
        assert tab.evaluate(unnamed.format("input, select", "one.closest('label')")) == 0
        assert tab.evaluate("document.documentElement.lang") == "en"
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.className") == "skip"


# Large and odd


def test_kept_and_recent_texts_stay_when_a_page_would_grow_too_large(night):
    wanted = [one for one in night.trials if one.kept or one.number == 7]
    room = sum(2 * len(one.source) + len(one.prompt) + len(one.reply) for one in wanted)
    assert fitting(night.trials, room) == {1, 2, 6, 7}
    assert fitting(night.trials, 0) == set()
    assert len(fitting(night.trials, 10**9)) == len(night.trials)


def test_very_long_files_are_not_compared_for_minutes():
    (line,) = diff_lines("a\n" * (MAX_LINES + 1), "b\n")
    assert "too long to compare" in line.text
    assert [line.kind for line in diff_lines("a\nb\n", "a\nc\n")] == ["hunk", "same", "del", "add", "same"]


def test_axes_have_a_few_round_numbers():
    assert nice_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(1, 40) == [10, 20, 30, 40]
    assert log_ticks(0.5, 50) == [0.5, 1, 2, 5, 10, 20, 50]
    assert nice_ticks(3, 3) != []


def test_a_session_that_never_began_has_a_report_too(tmp_path):
    workspace = make_workspace(tmp_path, script={"targets": {}}, recordings={"0001_*__x.py": kernel()})
    drive(workspace, "run", check=False)
    done = overnight(workspace, "report")
    assert done.returncode == 0, done.stderr
    assert "Nothing was tried yet" in done.stdout


def test_without_a_session_the_report_says_how_to_start_one(tmp_path):
    done = overnight(make_workspace(tmp_path), "report")
    assert done.returncode == 2
    assert "overnight run MODEL" in done.stderr
