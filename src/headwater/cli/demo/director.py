"""The director of the demonstration: looks at the log, asks the question, and has one shop killed and started again."""

from __future__ import annotations

import time

from headwater.cli.demo.orders import TOPIC
from headwater.cli.demo.proof import stored
from headwater.cli.demo.screen import EVENTS_SHOWN, Scene, Screen
from headwater.cli.demo.street import Shop, Street
from headwater.cli.output import rows_of
from headwater.cli.question import answer
from headwater.log.log import Log
from headwater.log.reader import Reader

QUESTION = "select product, count(*) as orders, sum(amount) as revenue from orders group by 1 order by 3 desc limit 5"
VICTIM = 2

_TICK_S = 0.2
_ASK_EVERY_S = 1.5
_RATE_OVER_TICKS = 5
_KILL_AT, _RESTART_AT = 0.35, 0.5


class Director:
    """Runs the demonstration from the moment the shops are open until all have closed."""

    def __init__(self, log: Log, street: Street, scene: Scene, screen: Screen) -> None:
        self._log = log
        self._street = street
        self._scene = scene
        self._screen = screen
        self._begun = time.monotonic()
        self._totals: list[tuple[float, int]] = [(self._begun, 0)]
        self._ask_at = 0.0
        self._todo = [(_KILL_AT, self._kill), (_RESTART_AT, self._restart)]

    def run(self) -> None:
        """Lets the day pass."""
        self._tell("four shops sell; an order is acknowledged when it is on disk")
        with self._log.reader(TOPIC, start="latest", columns=["at", "id", "product", "amount"]) as reader:
            while self._scene.elapsed_s < self._scene.seconds:
                time.sleep(_TICK_S)
                self._scene.elapsed_s = time.monotonic() - self._begun
                self._look(reader)
                self._act()
                self._street.check()
                self._screen.show(self._scene)
            self._tell("closing: every shop sends what is left")
            self._street.close()
            self._look(reader)
        self._ask()

    def _act(self) -> None:
        if self._todo and self._scene.elapsed_s >= self._todo[0][0] * self._scene.seconds:
            self._todo.pop(0)[1]()
        for shop in self._street.begin_those_ready():
            self._tell(
                f"{shop.name} (pid {shop.pid}) sends again from its first order; what is stored is not stored again"
            )
        if self._scene.elapsed_s >= self._ask_at:
            self._ask_at = self._scene.elapsed_s + _ASK_EVERY_S
            self._ask()

    def _kill(self) -> None:
        shop = self._victim()
        self._tell(f"kill -9 {shop.pid}: {shop.name} dies in the middle of its work")
        shop.kill()
        held = stored(self._log, shop.name)
        self._tell(f"{shop.name} had {shop.acknowledged:,} orders acknowledged; the log holds {held:,} of its orders")

    def _restart(self) -> None:
        self._tell(f"{self._victim().name} starts again and remembers nothing")
        self._victim().open_again()

    def _victim(self) -> Shop:
        return self._street.shops[VICTIM]

    def _look(self, reader: Reader) -> None:
        scene, now = self._scene, time.monotonic()
        scene.ends = {number: offsets.stop for number, offsets in self._log.offsets(TOPIC).items()}
        scene.total = sum(scene.ends.values())
        then, before = self._totals[0]
        scene.rate = (scene.total - before) / max(now - then, 1e-6)
        scene.rates.append(scene.rate)
        self._totals = [*self._totals, (now, scene.total)][-_RATE_OVER_TICKS:]
        for batch in reader.poll_arrow(timeout_s=0)[-EVENTS_SHOWN:]:
            scene.newest.extend(rows_of(batch.slice(batch.num_rows - 1)))

    def _ask(self) -> None:
        with answer(self._log, QUESTION) as batches:
            self._scene.answer = [row for batch in batches for row in rows_of(batch)]

    def _tell(self, step: str) -> None:
        self._screen.tell(self._scene, step)
