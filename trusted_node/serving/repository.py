"""The models of a node: by name, each from its folder, loaded and unloaded while others answer.

    names from the plans, or from the command line (mine=bundle/node), each once
    load:    LOADING -> READY; a loaded one is read anew, replaced when the new one is ready, and then drained
    unload:  UNLOADING (what waits and runs ends) -> UNAVAILABLE

Readiness is what this process can answer for: a model is ready when it is loaded and at least one of its servers is not
in quarantine. A server that is away does not count, since queries wait for it or go to another one (docs/operations.md)
and it may be back at any moment; quarantine ends only when somebody acts.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from heinfer.errors import HeinferError, InputError
from heinfer.plan import read_plan
from trusted_node.serving.interface import (
    VERSION,
    ModelEntry,
    ModelNotReadyError,
    ModelState,
    Observer,
    UnknownModelError,
)
from trusted_node.serving.loading import Commons, LoadedModel, ModelSettings, Teller

#: Seconds after which a node that stops looks again what a model waits for that is being changed.
_LOOK_S: Final = 0.1
#: Of a name on the command line.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,255}")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's name, and the node's part of its bundle."""

    name: str
    folder: Path


def parse_model_folders(texts: Sequence[str]) -> list[ModelFolder]:
    """Read folders, each with the plan's name for its model, or name=folder.

    Raises:
        InputError: a name is given twice, or is no name.
        PlanError: there is no bundle in a folder.
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        if equals and not Path(text).exists():
            if not _NAME.fullmatch(name):
                raise InputError(f"{text!r}: a model's name has letters, digits, '.', '_' and '-', found {name!r}")
            folder = Path(rest)
        else:
            folder = Path(text)
            name = read_plan(folder)[0].model.name
        if name in found:
            raise InputError(
                f"{found[name]} and {folder} are both models named {name!r}: give one another name, as in "
                f"{name}-2={folder}"
            )
        found[name] = folder
    return [ModelFolder(name, folder) for name, folder in found.items()]


@dataclass(slots=True)
class _Place:
    """A model's place in the repository, whether it is loaded or not.

    Attributes:
        folder: where it is read from.
        changing: held while it is loaded or unloaded.
        wanted: whether readiness waits for it.
        draining: what is being stopped while `changing` is held.
    """

    folder: Path
    changing: threading.Lock = field(default_factory=threading.Lock)
    state: ModelState = ModelState.UNAVAILABLE
    reason: str = "not loaded yet"
    model: LoadedModel | None = None
    wanted: bool = True
    draining: LoadedModel | None = None


class ModelRepository:
    """All models of a node; see `trusted_node.serving.interface.Models`. Nothing is loaded at first.

    Args:
        folders: names and folders, each name once.
        settings: how models are run.
        observer: is told of queries that end.
        teller: is told how loading goes.
    """

    def __init__(
        self,
        folders: Sequence[ModelFolder],
        settings: ModelSettings,
        observer: Observer | None = None,
        teller: Teller | None = None,
    ) -> None:
        self._places = {folder.name: _Place(folder.folder) for folder in folders}
        self._settings = settings
        self._observer = observer
        self._teller = teller
        self._commons = Commons(settings)
        self._closed = False

    @property
    def names(self) -> list[str]:
        """All names, in the order in which they were given."""
        return list(self._places)

    def load_all(self) -> None:
        """Load all models, one after the other. Raises as `load`."""
        for name in self._places:
            self.load(name)

    def get(self, name: str, version: str = "") -> LoadedModel:
        """Return a loaded model."""
        place = self._place(name)
        if version not in ("", VERSION):
            raise UnknownModelError(f"model {name!r} has version {VERSION} only, found {version!r}")
        model = place.model
        if model is None:
            raise ModelNotReadyError(f"model {name!r} is not ready: {place.reason or place.state.value.lower()}")
        return model

    def entries(self) -> Sequence[ModelEntry]:
        """Return the index, by name. A model is unavailable, too, while all its servers are in quarantine."""
        return [self._entry(name, place) for name, place in sorted(self._places.items())]

    @property
    def ready(self) -> bool:
        """Whether every model that was named at the start or loaded since is ready."""
        wanted = [(name, place) for name, place in self._places.items() if place.wanted]
        return not self._closed and all(self._entry(*pair).state is ModelState.READY for pair in wanted)

    def load(self, name: str) -> None:
        """Load a model, or read a loaded one anew; who loads one that is being changed waits."""
        place = self._place(name)
        with place.changing:
            if self._closed:
                raise ModelNotReadyError("the node is stopping")
            place.wanted = True
            if place.model is None:
                place.state, place.reason = ModelState.LOADING, "it is being loaded"
            try:
                loaded = LoadedModel(name, place.folder, self._settings, self._commons, self._observer, self._teller)
            except BaseException as error:
                said = str(error) if isinstance(error, HeinferError) else "internal error, see the node's log"
                place.reason = f"loading failed: {said}"
                if place.model is None:
                    place.state = ModelState.UNAVAILABLE
                raise
            before, place.model = place.model, loaded
            place.state, place.reason = ModelState.READY, ""
            if before is not None:
                before.replace_by(loaded)
                self._stop(place, before, None)

    def unload(self, name: str) -> None:
        """Unload a model; one that is not loaded stays so."""
        place = self._place(name)
        if not place.changing.acquire(blocking=False):
            raise ModelNotReadyError(f"model {name!r} is being loaded or unloaded: ask again when that is done")
        try:
            place.wanted = False
            self._take_down(place, None)
        finally:
            place.changing.release()

    def close(self, grace_s: float) -> None:
        """Take no more queries, let what runs end within the grace, and wipe what was prepared; all models at once."""
        self._closed = True
        threads = [
            threading.Thread(target=self._take_down_when_free, args=(place, grace_s)) for place in self._places.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._commons.close()

    def _take_down_when_free(self, place: _Place, grace_s: float) -> None:
        while not place.changing.acquire(timeout=_LOOK_S):
            if (draining := place.draining) is not None:
                draining.hurry(grace_s)
        try:
            self._take_down(place, grace_s)
        finally:
            place.changing.release()

    def _take_down(self, place: _Place, grace_s: float | None) -> None:
        if (model := place.model) is not None:
            place.state, place.reason = ModelState.UNLOADING, "it is being unloaded"
            place.model = None
            self._stop(place, model, grace_s)
        place.state, place.reason = ModelState.UNAVAILABLE, "it was unloaded"

    @staticmethod
    def _stop(place: _Place, model: LoadedModel, grace_s: float | None) -> None:
        place.draining = model
        try:
            model.stop(grace_s)
        finally:
            place.draining = None

    def _place(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None:
            raise UnknownModelError(f"no model {name!r} here: expected one of {sorted(self._places)}")
        return place

    @staticmethod
    def _entry(name: str, place: _Place) -> ModelEntry:
        model, state, reason = place.model, place.state, place.reason
        if model is not None and model.in_quarantine:
            state, reason = ModelState.UNAVAILABLE, "all its servers are in quarantine: see the node's log"
        return ModelEntry(name, VERSION, state, reason)
