"""The page: routes and what they show. All state stays on ddrl's server; a page is made from it for each request."""

from __future__ import annotations

import json
import math
import secrets
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import anyio
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ddrl import api
from ddrl import config as configs
from ddrl.cli import compare, fleet, output, policies, settings, view
from ddrl.cli import format as texts
from ddrl.cli import runs as listing
from ddrl.cli.output import Client, InputError
from ddrl.cli.watcher import Figures
from ddrl.config import ConfigError
from ddrl.runs.records import Records
from ddrl.store import connection, ledger, logs, runs, weights
from ddrl.store.connection import StoreError
from ddrl.store.runs import UnknownRunError
from ddrl.web import charts
from ddrl.web.access import COOKIE, SafeHeaders, Session, Sessions, is_from_here, is_own_form
from ddrl.web.feed import EVERY_S, Feeds, sparks

HERE = Path(__file__).parent
LOG_LINES, JOURNAL_ROWS, EVALUATION_ROWS, EPISODE_ROWS = 200, 50, 12, 10
MOST_FILMS, MOST_MADE = 8, 100  # kept
MOST_EPISODES = 10_000  # of an evaluation
# Limits of a form; the answer to a larger one is 400.
SMALL: dict[str, int] = {"max_files": 0, "max_fields": 10, "max_part_size": 65_536}
SORTED = {"age": "created_s", "return": "return_mean", "steps": "env_steps", "status": "status", "env": "env"}
WRONG_S = 1.0  # before the answer to a wrong password
PING_S = 15.0  # between two signs of life
CHART_S = 5.0  # between two drawings of a chart, which take longer than all else
Page = Callable[[Request, Session | None], Response]
Parts = dict[str, str]  # of a page that changes: name -> HTML, or JSON of a chart


def create(client: Client, *, hosts: Sequence[str], password: str = "", controls: bool = False) -> Starlette:
    """Return the application.

    Args:
        client: connection to the server.
        hosts: names by which browsers may reach it; a page of another name that leads here is refused.
        password: asked for before anything is shown; empty: none.
        controls: who gave the password may change runs.
    """
    pages = _Pages(client, Sessions(password), controls)
    routes = [
        *(Route(path, pages.shown(page)) for path, page in pages.reading.items()),
        *(Route(path, pages.done(page), methods=["POST"]) for path, page in pages.changing.items()),
        Route("/runs/{run}/export", pages.done(pages.export, "/policy"), methods=["POST"]),
        Route("/login", pages.login, methods=["GET", "POST"]),
        Route("/runs/{run}/events", pages.events),
        Mount("/static", StaticFiles(directory=HERE / "static")),
    ]
    refusals = {UnknownRunError: 404, InputError: 400, ConfigError: 400, StoreError: 400}
    handlers: Any = {kind: partial(pages.refused, code) for kind, code in refusals.items()}
    handlers |= dict.fromkeys(connection.OUTAGES, partial(pages.refused, 503)) | {
        404: partial(pages.refused, 404)
    }
    middleware = [Middleware(SafeHeaders), Middleware(TrustedHostMiddleware, allowed_hosts=[*hosts])]
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)


class _Pages:
    def __init__(self, client: Client, sessions: Sessions, controls: bool) -> None:
        self._client, self._sessions, self._controls = client, sessions, controls
        self._feeds, self._films = Feeds(client), dict[str, bytes]()
        # By run, axis and figure: of what, when, parts.
        self._made = dict[tuple[str, ...], tuple[Records, float, Any]]()
        self._templates = Environment(
            loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._templates.filters |= {
            name: getattr(texts, name)
            for name in ("cell", "counted", "duration", "number", "percent", "score", "size")
        }
        self.reading: dict[str, Page] = {
            "/": self.runs,
            "/runs/{run}": self.run,
            "/runs/{run}/logs": self.logs,
            "/runs/{run}/audit": self.audit,
            "/runs/{run}/episodes": self.episodes,
            "/runs/{run}/films/{name}": self.film,
            "/runs/{run}/policy": self.policy,
            "/compare": self.compare,
            "/fleet": self.fleet,
        }
        self.changing: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
            "/runs/{run}/pause": self._pause,
            "/runs/{run}/resume": self._resume,
            "/runs/{run}/stop": self._stop,
            "/runs/{run}/set": self._set,
            "/runs/{run}/evaluate": self._evaluate,
        }

    # --- answers -------------------------------------------------------------------------------------------

    def shown(self, page: Page) -> Callable[[Request], Response]:
        """Return the endpoint of a page that someone may look at."""

        def answer(request: Request) -> Response:
            session = self._sessions.of(request)
            if self._sessions.has_password and session is None:
                return RedirectResponse("/login?" + urlencode({"to": request.url.path}), 303)
            return page(request, session)

        return answer

    def done(
        self, change: Callable[[str, Mapping[str, Any]], str], then: str = ""
    ) -> Callable[[Request], Any]:
        """Return the endpoint of a form that changes a run, and notes in its journal who did it; `then` is shown."""

        async def answer(request: Request) -> Response:
            session = self._sessions.of(request)
            if not self._controls:
                return self._problem(request, 403, "this page only shows; start it with `ddrl web --control`")
            form: Mapping[str, Any] = {} if session is None else await request.form(**SMALL)
            if session is None or not is_own_form(request, form.get("token"), session):
                return self._problem(
                    request, 403, "this form is not of a page that you have open; log in again"
                )

            def act() -> str:
                run = output.resolve(self._client, request.path_params["run"])
                runs.note(self._client, run, "control", f"{session.name}: {change(run, form)}")
                self._feeds.forget(run)
                return run

            query = f"?{urlencode({'version': str(form.get('version') or '')})}" if then else ""
            return RedirectResponse(f"/runs/{await run_in_threadpool(act)}{then}{query}", 303)

        return answer

    async def login(self, request: Request) -> Response:
        """Ask for the password, or open a session."""
        form = await request.form(**SMALL) if request.method == "POST" else {}
        if not form:
            return self._page(
                request, "login.html", None, wrong=False, to=request.query_params.get("to", "/")
            )
        to, given = str(form.get("to", "/")), (str(form.get("name", "")), str(form.get("password", "")))
        cookie = self._sessions.open(*given) if is_from_here(request) else None
        if cookie is None:
            await anyio.sleep(WRONG_S)
            return self._page(request, "login.html", None, code=403, wrong=True, to=to)
        answer = RedirectResponse(to if to.startswith("/") and not to.startswith("//") else "/", 303)
        is_secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, cookie, httponly=True, samesite="lax", secure=is_secure)
        return answer

    def refused(self, code: int, request: Request, error: Exception) -> Response:
        """Answer a request that cannot be served with a page that says why."""
        reason = connection.outage(error) or getattr(error, "detail", None) or str(error)
        return self._problem(request, code, reason)

    def _problem(self, request: Request, code: int, reason: str) -> Response:
        return self._page(request, "problem.html", self._sessions.of(request), code=code, reason=reason)

    def _page(
        self, request: Request, template: str, session: Session | None, *, code: int = 200, **values: Any
    ) -> Response:
        may_change = self._controls and session is not None
        values |= {"session": session, "may_change": may_change, "here": request.url.path}
        return HTMLResponse(self._templates.get_template(template).render(values), code)

    # --- pages ---------------------------------------------------------------------------------------------

    def runs(self, request: Request, session: Session | None) -> Response:
        """List the runs, the newest first."""
        asked = request.query_params
        now_s = runs.server_ms(self._client) / 1e3
        states = runs.states(self._client, runs.names(self._client))
        rows = [row for state in states if (row := listing.describe(self._client, state, now_s))]
        words = asked.get("q", "").lower().split()
        shown = [
            row for row in rows if all(word in " ".join(map(str, row.values())).lower() for word in words)
        ]
        if status := asked.get("status", ""):
            shown = [row for row in shown if row["status"] == status]
        by = SORTED.get(asked.get("sort", ""), "created_s")
        there = [row for row in shown if row[by] is not None]
        there.sort(key=lambda row: row[by], reverse=by not in ("status", "env"))
        shown = there + [row for row in shown if row[by] is None]
        known = {state.run: state for state in states}
        states = [known[row["run"]] for row in shown]
        lines = map(charts.sparkline, sparks(self._client, states, now_s))
        values: dict[str, Any] = {
            "rows": [*zip(shown, states, lines, strict=True)],
            "statuses": sorted({row["status"] for row in rows}),
            "sorts": SORTED,
            "asked": asked,
            "num_all": len(rows),
            "now_s": now_s,
        }
        return self._page(request, "runs.html", session, **values)

    def run(self, request: Request, session: Session | None) -> Response:
        """Show one run, as of now."""
        run = output.resolve(self._client, request.path_params["run"])
        if run != request.path_params["run"]:
            return RedirectResponse(f"/runs/{run}", 303)
        parts, values = self._parts(run, request.query_params), self._values(run)
        over, name = self._asked(request.query_params)
        names = sorted({name for row in values["records"].figures[-1:] for name in row} - {"time_s"})
        values |= {"parts": parts, "over": over, "axes": charts.AXES, "names": names, "figure": name}
        return self._page(
            request, "run.html", session, differences=_differences(self._client, values["records"]), **values
        )

    def policy(self, request: Request, session: Session | None) -> Response:
        """Send a version as `ddrl export` writes it, to who may export."""
        if not self._controls or session is None:
            return self._problem(request, 403, "whoever exports has to log in to `ddrl web --control`")
        run = output.resolve(self._client, request.path_params["run"])
        version = policies.choose(self._client, run, request.query_params.get("version") or None)
        with tempfile.TemporaryDirectory() as folder:
            path = policies.write(self._client, run, version, Path(folder), force=False)
            data, attached = path.read_bytes(), f'attachment; filename="{path.name}"'
        return Response(
            data, headers={"content-disposition": attached}, media_type="application/octet-stream"
        )

    async def events(self, request: Request) -> Response:
        """Stream the parts of a run's page that change."""

        def may_look() -> bool:
            return not self._sessions.has_password or self._sessions.of(request) is not None

        if not may_look():
            return Response(status_code=401)
        run, asked = request.path_params["run"], request.query_params

        async def stream() -> AsyncIterator[str]:
            sent, spoken_at = Parts(), time.monotonic()
            while may_look() and not await request.is_disconnected():
                try:
                    parts = await run_in_threadpool(self._parts, run, asked)
                except StoreError:  # it was deleted, or cannot be read
                    return
                except connection.OUTAGES as error:
                    parts = {"trouble": connection.outage(error) or "the server does not answer"}
                else:
                    parts["trouble"] = ""
                for name, text in parts.items():
                    if sent.get(name) != text:
                        sent[name], spoken_at = text, time.monotonic()
                        lines = (f"data: {line}" for line in text.splitlines() or [""])
                        yield "\n".join((f"event: {name}", *lines, "\n"))
                if time.monotonic() - spoken_at > PING_S:
                    spoken_at = time.monotonic()
                    yield ": alive\n\n"
                await anyio.sleep(EVERY_S)

        return StreamingResponse(stream(), media_type="text/event-stream")

    def logs(self, request: Request, session: Session | None) -> Response:
        """Show the newest lines of a run's log."""
        run = output.resolve(self._client, request.path_params["run"])
        lines = logs.read(self._client, run)[0][-LOG_LINES:]
        return self._page(request, "logs.html", session, run=run, lines=lines)

    def audit(self, request: Request, session: Session | None) -> Response:
        """Show whether every fragment of a run is accounted for."""
        run = output.resolve(self._client, request.path_params["run"])
        found = ledger.audit(self._client, run)
        reads = runs.state(self._client, run).reads
        return self._page(request, "audit.html", session, run=run, found=found, reads=reads)

    def episodes(self, request: Request, session: Session | None) -> Response:
        """Show the latest, best and worst training episodes of a run, and one that is played if that is asked for."""
        from ddrl.web import film  # which loads torch

        run, asked = output.resolve(self._client, request.path_params["run"]), request.query_params
        version, seed, played = asked.get("version") or "best", asked.get("seed") or "1000", None
        if not seed.isdigit() or int(seed) >= 2**31:
            raise InputError(f"seed {seed}: give a whole number below {2**31:,}")
        if asked.get("play"):
            picture, score, length = film.play(api.Run(run).policy(version), int(seed))
            while len(self._films) >= MOST_FILMS:
                del self._films[next(iter(self._films))]
            name = secrets.token_urlsafe()
            self._films[name], played = picture, {"name": name, "score": score, "length": length}
        rows = self._feeds.look(run)[1].episodes
        ranked = sorted(rows, key=lambda row: row["return"])
        tables = {
            "Latest": rows[::-1][:EPISODE_ROWS],
            "Best": ranked[::-1][:EPISODE_ROWS],
            "Worst": ranked[:EPISODE_ROWS],
        }
        values: dict[str, Any] = {
            "run": run,
            "version": version,
            "seed": seed,
            "film": played,
            "tables": tables,
        }
        has_images = film.sees_images(runs.spaces(self._client, run))
        return self._page(request, "episodes.html", session, has_images=has_images, **values)

    def film(self, request: Request, _: Session | None) -> Response:
        """Return the moving picture of an episode that was played, or of the stream."""
        from ddrl.web import film

        name = request.path_params["name"]
        picture = (
            film.newest(self._client, request.path_params["run"]) if name == "now" else self._films.get(name)
        )
        return Response(picture, media_type="image/webp") if picture else Response(status_code=404)

    def compare(self, request: Request, session: Session | None) -> Response:
        """Show several runs side by side."""
        names = [
            *dict.fromkeys(output.resolve(self._client, run) for run in request.query_params.getlist("run"))
        ]
        if len(names) < 2:
            raise InputError("compare: tick two or more runs")
        over, _ = self._asked(request.query_params)
        found = [self._feeds.look(run)[1] for run in names]
        rows, options = compare.report(self._client, found)
        values: dict[str, Any] = {
            "rows": rows,
            "options": options,
            "chart": json.dumps(charts.of_runs(found, over)),
        }
        return self._page(
            request, "compare.html", session, names=names, over=over, axes=charts.AXES, **values
        )

    def fleet(self, request: Request, session: Session | None) -> Response:
        """Show machines, and what they play."""
        return self._page(request, "fleet.html", session, report=fleet.collect(self._client))

    # --- a run's page --------------------------------------------------------------------------------------

    def _values(self, run: str) -> dict[str, Any]:
        figures, records = self._feeds.look(run)
        return {
            "figures": figures,
            "records": records,
            "state": figures.state,
            "config": figures.config,
            "shown": view.cells(figures) | view.other_metrics(figures),
            "sentences": _where_time_goes(figures),
            "index": weights.index(self._client, run),
            "evaluated": figures.evaluated[: -EVALUATION_ROWS - 1 : -1],
            "entries": records.journal[: -JOURNAL_ROWS - 1 : -1],
        }

    def _parts(self, run: str, asked: Mapping[str, str]) -> Parts:
        """Return the parts of a run's page that change, made once for all who look."""
        over, name = self._asked(asked)
        records = self._feeds.look(run)[1]

        def texts_of() -> Parts:
            module: Any = self._templates.get_template("parts.html").make_module(self._values(run))
            return {
                part: str(getattr(module, part)()) for part in ("head", "cells", "evaluations", "journal")
            }

        def chart(of: Callable[..., Any], *arguments: str) -> str:
            return json.dumps(of(records, *arguments))

        made: Parts = self._kept((run,), records, 0.0, texts_of)
        return made | {
            "chart": self._kept((run, over), records, CHART_S, partial(chart, charts.of_run, over)),
            "figure": self._kept(
                (run, over, name), records, CHART_S, partial(chart, charts.of_figure, over, name)
            ),
        }

    def _kept(self, key: tuple[str, ...], records: Records, for_s: float, make: Callable[[], Any]) -> Any:
        """Return what was made of these records, or less than `for_s` ago; else make it."""
        now = time.monotonic()
        of, made_s, made = self._made.get(key, (None, -math.inf, None))
        if of is not records and now - made_s >= for_s:
            if len(self._made) >= MOST_MADE:
                self._made.clear()
            made = make()
            self._made[key] = records, now, made
        return made

    def _asked(self, asked: Mapping[str, str]) -> tuple[str, str]:
        """Return the axis and the figure of a page's charts."""
        over = asked.get("over", "")
        return over if over in charts.AXES else "time_s", asked.get("figure") or "env_steps_per_s"

    # --- changes -------------------------------------------------------------------------------------------

    def _pause(self, run: str, _: Mapping[str, Any]) -> str:
        api.Run(run).pause()
        return "paused"

    def _resume(self, run: str, form: Mapping[str, Any]) -> str:
        more = str(form.get("time", "")).strip()
        api.Run(run).resume(time=more or None)
        return f"resumed, {more} more" if more else "resumed"

    def _stop(self, run: str, _: Mapping[str, Any]) -> str:
        listing.change_status(self._client, run, "stopped")
        threading.Thread(target=api.Run(run).stop, daemon=True).start()  # which waits for the results
        return "stopped"

    def _set(self, run: str, form: Mapping[str, Any]) -> str:
        option, value = str(form.get("option", "")).strip(), str(form.get("value", ""))
        done = api.Run(run).set({option: configs.plain(option, value)})
        return (
            ", ".join(f"{row['option']} {row['from']} -> {row['to']}" for row in done["changes"])
            or "no change"
        )

    def export(self, run: str, form: Mapping[str, Any]) -> str:
        """Return what the journal says of an export; `policy` sends the file."""
        version = policies.choose(self._client, run, str(form.get("version") or "") or None)
        return f"exports version {version}"

    def _evaluate(self, run: str, form: Mapping[str, Any]) -> str:
        version, episodes = str(form.get("version") or "best"), str(form.get("episodes") or 100)
        if not (episodes.isdigit() and 0 < (num := int(episodes)) <= MOST_EPISODES):
            raise InputError(f"episodes {episodes}: give a number from 1 to {MOST_EPISODES:,}")

        def play() -> None:
            try:
                done = api.Run(run).evaluate(num, version)
                text = f"{texts.score(done)} over {num} episodes"
            except Exception as error:
                text = str(error)
            runs.note(self._client, run, "evaluated", f"version {version}: {text}")

        threading.Thread(target=play, daemon=True).start()
        return f"evaluates version {version} over {num} episodes"


def _where_time_goes(figures: Figures) -> list[str]:
    """Return in plain words what the learner and the processes that play spend their time on."""
    waits, recent = figures.row.get("learner_wait"), figures.recent
    sentences = []
    if waits is not None:
        advice = "well balanced"
        if waits > 0.3:
            advice = "more workers would help"
        elif waits < 0.05:
            advice = "the learner limits"
        sentences.append(f"The learner waits for experience {texts.percent(waits)} of its time: {advice}.")
    if recent.played is not None:
        sentences.append(
            f"The processes play {texts.percent(recent.played)} of theirs, wait for the learner"
            f" {texts.percent(recent.allowance_wait)}, and for room on the server {texts.percent(recent.room_wait)}."
        )
    if figures.row.get("server_wait_s", 0.0) >= view.MIN_SERVER_WAIT_S:
        sentences.append(
            f"The server lets the learner wait {figures.row['server_wait_s']:.2f} s between two reports."
        )
    return sentences


def _differences(client: Client, records: Records) -> list[tuple[str, Any, Any]]:
    """Return option, value and default of the settings that differ from what the environment and algorithm give."""
    spaces = runs.spaces(client, records.state.run)
    least = {"env": {"id": records.config.env.id}, "algorithm": {"name": records.config.algorithm["name"]}}
    try:
        own = settings.values_of(records.config, spaces)
        usual = settings.values_of(configs.load(least, {}), spaces)
    except (ConfigError, ImportError):  # an algorithm of the user's need not be there
        own, usual = configs.flat(records.config.model_dump(mode="json", by_alias=True)), {}
    return [(name, value, usual.get(name)) for name, value in own.items() if value != usual.get(name)]
