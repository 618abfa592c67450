"""The director of the demonstration: watches log, application and views, and kills a producer and the application.

The visitors click while Spark starts; the first rows of a view are the first result. Then the director kills and restarts
the process of one region, then the application. When both are back and the time is up, or at Ctrl-C, it waits until
everything is sent and the views have caught up, and compares the result with DuckDB's.
"""

from __future__ import annotations

import time
from contextlib import suppress

from headwater.app.app import App
from headwater.cli.demo.application import Application
from headwater.cli.demo.clicks import TOPIC
from headwater.cli.demo.crowd import Crowd, Region
from headwater.cli.demo.proof import QUESTIONS, Agreement, compare, stored
from headwater.cli.demo.screen import DemoScreen, Scene
from headwater.cli.demo.termination import Termination
from headwater.log.log import Log
from headwater.model.errors import HeadwaterError, NotFound, TimedOut

VICTIM = 2
FIRST_S_MAX = 300.0
CATCH_UP_S_MAX = 120.0

_TICK_S = 0.2
_VIEWS_EVERY_S = 0.5
_RATE_OVER_TICKS = 10
_KILL_REGION_S, _REGION_AGAIN_S, _KILL_APPLICATION_S = 3.0, 5.0, 9.0
_GO_ON_S = 3.0


class Director:
    """Runs the demonstration from the first click to the last."""

    def __init__(
        self,
        log: Log,
        app: App,
        application: Application,
        crowd: Crowd,
        scene: Scene,
        screen: DemoScreen,
        termination: Termination,
    ) -> None:
        self._log = log
        self._app = app
        self._application = application
        self._crowd = crowd
        self._scene = scene
        self._screen = screen
        self._termination = termination
        self._totals: list[tuple[float, int]] = [(time.monotonic(), 0)]
        self._views_at = 0.0
        self._seen_before_kill = 0
        self._todo = [
            (_KILL_REGION_S, self._kill_region),
            (_REGION_AGAIN_S, self._open_region_again),
            (_KILL_APPLICATION_S, self._kill_application),
        ]

    def run(self) -> list[Agreement]:
        """Runs to the end; returns whether the views agree with DuckDB."""
        self._tell("three producers send clicks, each acknowledged when it is on disk; Spark is starting")
        try:
            with self._termination.at_ticks():
                while not self._is_over():
                    self._termination.tick()
                    self._look()
                    self._act()
                    time.sleep(_TICK_S)
        except KeyboardInterrupt:
            if self._scene.first_s is None:
                raise
            self._scene.is_cut_short = True
            self._tell("Ctrl-C: closing early; press Ctrl-C again to exit at once")
        return self._close()

    def _is_over(self) -> bool:
        scene = self._scene
        if scene.first_s is None:
            if scene.elapsed_s > FIRST_S_MAX:
                raise TimedOut(
                    f"The application did not produce a result within {FIRST_S_MAX:g} s.",
                    advice="Run the demo again when the machine is less busy.",
                )
            return False
        back = not self._todo and scene.back_s is not None and scene.elapsed_s >= scene.back_s + _GO_ON_S
        return back and self._crowd.is_whole and scene.elapsed_s >= scene.seconds

    def _look(self) -> None:
        scene, now = self._scene, time.monotonic()
        scene.total = sum(offsets.stop for offsets in self._log.offsets(TOPIC).values())
        then, before = self._totals[0]
        scene.rate = (scene.total - before) / max(now - then, 1e-6)
        scene.rates.append(scene.rate)
        self._totals = [*self._totals, (now, scene.total)][-_RATE_OVER_TICKS:]
        scene.status = self._application.status
        if self._application.url and not scene.url:
            scene.url = self._application.url
            self._tell(f"status page: {scene.url}")
            self._screen.open_page(scene.url)
        if scene.elapsed_s >= self._views_at:
            self._views_at = scene.elapsed_s + _VIEWS_EVERY_S
            self._look_at_views()
        self._crowd.check()
        self._application.check()
        self._screen.show(scene)

    def _look_at_views(self) -> None:
        scene = self._scene
        with suppress(NotFound), self._app.views["top_pages"] as view:
            scene.top = [(row["page"], row["visits"]) for row in view.rows().to_pylist()]
        with suppress(NotFound), self._app.views["per_minute"] as view:
            rows = view.rows(order=["-minute", "-visits"], limit=8).to_pylist()
            scene.minutes = [(row["minute"], row["page"], row["visits"]) for row in rows]
        counted = scene.counted
        if scene.first_s is None and counted:
            scene.first_s = scene.elapsed_s
            self._tell(f"first result after {scene.first_s:.1f} s: the view top_pages has {counted:,} visits")
        if scene.killed_s is not None and scene.back_s is None and counted > self._seen_before_kill:
            scene.back_s = scene.elapsed_s
            self._tell(f"the application resumes {scene.back_s - scene.killed_s:.1f} s after the kill")

    def _act(self) -> None:
        scene = self._scene
        if scene.first_s is not None and self._todo and scene.elapsed_s >= scene.first_s + self._todo[0][0]:
            self._todo.pop(0)[1]()
        for region in self._crowd.begin_those_ready():
            self._tell(f"{region.name} (pid {region.pid}) sends all its clicks again; the log skips those that it has")

    def _kill_region(self) -> None:
        region = self._victim()
        self._tell(f"kill -9 {region.pid}: the producer of {region.name} dies while it writes")
        region.kill()
        held = stored(self._log, region.name)
        self._tell(f"{region.name} had {region.acknowledged:,} acknowledged clicks; the log has {held:,} clicks")

    def _open_region_again(self) -> None:
        self._tell(f"the producer of {self._victim().name} restarts without any memory")
        self._victim().open_again()

    def _kill_application(self) -> None:
        scene = self._scene
        self._tell(f"kill -9 {self._application.pid}: the application and Spark die in the middle of a batch")
        self._application.kill()
        self._look_at_views()
        scene.killed_s, scene.status, self._seen_before_kill = scene.elapsed_s, None, scene.counted
        self._application.open_again()
        self._tell(f"the application restarts as process {self._application.pid}; new clicks wait in the log")

    def _victim(self) -> Region:
        return self._crowd.regions[VICTIM]

    def _close(self) -> list[Agreement]:
        self._tell("closing: the producers send their last clicks, and the views catch up")
        self._crowd.close()
        counted, deadline = -1, 0.0
        while True:
            self._look()
            found = self._compared()
            if sum(each.visits for each in found) > counted:  # it is only slow, and not wrong, while they still count
                counted, deadline = sum(each.visits for each in found), time.monotonic() + CATCH_UP_S_MAX
            if all(each.is_right for each in found) or time.monotonic() > deadline:
                break
            time.sleep(_TICK_S)
        self._look()
        self._application.close()
        return found

    def _compared(self) -> list[Agreement]:
        found = []
        for name in QUESTIONS:
            try:
                with self._app.views[name] as view:
                    found.append(compare(self._log, view))
            except NotFound as error:
                raise HeadwaterError(error.what, advice="This is a bug in Headwater. Report it.") from error
        return found

    def _tell(self, step: str) -> None:
        self._screen.tell(self._scene, step)
