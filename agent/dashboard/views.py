"""The dashboard's pages as HTML, from the shelf; the pieces of a page are the report's."""

import json
from typing import Any
from urllib.parse import quote

from agent.dashboard.activity import activity, machine_words
from agent.dashboard.boards import MAX_HITS, boards, compare, search
from agent.dashboard.shelf import Shelf
from agent.errors import InputError
from agent.morning.cards import card
from agent.morning.headline import headline
from agent.morning.night import Night, Trial
from agent.morning.page import environment, night_values
from agent.places import SessionPlaces

RECENT = 200  # rows of a session's page, unless all are asked for
MAX_QUERY = 200


class Views:
    """Renders pages."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def home(self) -> str:
        """All sessions."""
        spines = self._shelf.spines()
        tops = {one.name: headline(one.night) for one in spines if one.night}
        return _render("home", title="Sessions", spines=spines, tops=tops, live=_live(self._shelf.revisions()))

    def session(self, name: str, *, everything: bool = False) -> str:
        """One session, live."""
        spine, night = self._shelf.spine(name), self._shelf.night(name)
        rows = night.trials[::-1] if everything else night.trials[::-1][:RECENT]
        return _render(
            "session",
            title=night.name,
            live=_live({name: spine.revision}),
            rows=rows,
            doing=activity(SessionPlaces(self._shelf.root, name), night),
            machine=machine_words(),
            **night_values(night),
        )

    def experiment(self, name: str, number: int, *, body_only: bool = False) -> str:
        """One experiment, whole or as a piece for the session's page."""
        night, trial = self._shelf.night(name), self._shelf.trial(name, number)
        values = {"night": night, "card": card(night, trial)}
        return _render("body" if body_only else "experiment", title=f"{name}, experiment {number}", live="", **values)

    def kernels(self, target: str, device: str) -> str:
        """The fastest accepted kernels of all sessions."""
        every = boards(self._shelf.nights())
        return _render(
            "kernels",
            title="Kernels",
            boards=[one for one in every if target in {"", one.target} and device in {"", one.device}],
            targets=sorted({one.target for one in every}),
            devices=sorted({one.device for one in every}),
            target=target,
            device=device,
            live=_live(self._shelf.revisions()),
        )

    def search(self, query: str) -> str:
        """Experiments of all sessions that hold the words."""
        asked = query[:MAX_QUERY]
        hits, count = search(self._shelf.nights(), asked)
        return _render("search", title="Search", query=asked, hits=hits, count=count, limit=MAX_HITS, live="")

    def compare(self, first: str, second: str) -> str:
        """Two experiments side by side, each given as SESSION:NUMBER."""
        found = compare(*self._pick(first), *self._pick(second))
        return _render("compare", title="Compare", found=found, first=first, second=second, live="")

    def message(self, title: str, words: str) -> str:
        """Why there is no such page."""
        return _render("message", title=title, words=words, live="")

    def _pick(self, text: str) -> tuple[Night, Trial]:
        name, _, number = text.rpartition(":")
        if not number.isascii() or not number.isdigit() or len(number) > 9:
            raise InputError("An experiment is named SESSION:NUMBER, for example night:12.")
        night = self._shelf.night(name)
        trial = night.trial(int(number))
        if trial is None:
            raise InputError(f"Session {name} has no experiment {int(number)}.")
        return night, trial


def _live(revisions: dict[str, str]) -> str:
    return json.dumps(revisions)


def _render(template: str, **values: Any) -> str:
    page = environment().get_template(f"dashboard/{template}.html.j2")
    return page.render(session_url=session_url, **values)


def session_url(name: str, number: int | None = None) -> str:
    """Where a session's or an experiment's page is."""
    place = f"/session/{quote(name, safe='')}"
    return place if number is None else f"{place}/experiment/{number}"
