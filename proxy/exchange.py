"""The life of one exchange, top to bottom in call order: accept, decode, judge, decide, claim, send, gate, record.

This file moves bytes between the two sides and carries out what the pure parts decide. Nothing that breaks in
judging or recording touches traffic that is only observed: it is counted, and the bytes go on.

Two orders of work. Where nothing can be enforced, bytes go to the provider as they come and are judged beside that.
Where something may be refused, the body is read first, then judged, claimed in the ledger, then sent.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Final

import turngate
from turngate.adapters import levels, registry
from turngate.adapters.clients import client_family
from turngate.adapters.dialect import Dialect, Trouble, Undecodable, context_of
from turngate.proxy import wire
from turngate.proxy.app_side import App, AppGone
from turngate.proxy.config import Policy, Settings
from turngate.proxy.judging import Judge, Judged
from turngate.proxy.ledger_sqlite import ClaimConflict, Ledger, LedgerDown
from turngate.proxy.owners import owner_of
from turngate.proxy.record import Record, traceparent_of
from turngate.proxy.reply import ENDED_WELL, Kept, Reply, class_of
from turngate.proxy.rollout import Action, Ladder, Stage, decide, enforced, first_turn
from turngate.proxy.routes import NoRoute, Route, Routes
from turngate.proxy.upstream import Broken, Head, Link, Pool, Unreachable
from turngate.proxy.wire import Framing
from turngate.proxy.witnesses import Carried
from turngate.telemetry.events import AnyEvent, shown_model
from turngate.validators.gate import HoldBudget
from turngate.validators.graph import MessageSequence
from turngate.validators.ledger import (
    OPEN,
    Dispatch,
    End,
    EndedBy,
    LateEvent,
    Retries,
    State,
    may_release,
)
from turngate.validators.previews import Hit, Marks, refused_for
from turngate.validators.rules import Judgement, Reason, Verdict
from turngate.validators.schemas import Declared, Schemas
from turngate.validators.stream import Ending, Finish, Turn, TurnVerdict

CONVERSATION_CHARACTERS_MAX: Final = 128
"""Of a conversation's name; what differs behind them is one conversation."""

RETRY_COUNT: Final = b"x-stainless-retry-count"

ENDS: Final[dict[Finish, End]] = {Finish.TRUNCATED: "truncated", Finish.FILTERED: "filtered"}


@dataclass(frozen=True, slots=True)
class Services:
    """What every exchange uses. Clocks, ids and the key are arguments, so that a whole proxy can run under a seed."""

    settings: Settings
    ladder: Ladder
    routes: Routes
    pool: Pool
    ledger: Ledger
    emit: Callable[[AnyEvent], None]
    monotonic: Callable[[], float]
    wall: Callable[[], float]
    new_operation: Callable[[], str]
    judge: Judge
    digest_key: bytes
    instance: str
    holds: HoldBudget
    schemas: Schemas
    marks: Marks
    retries: Retries

    def keyed(self, digest: bytes) -> str:
        """What files hold of a sha256: without the key a short text cannot be guessed from it."""
        return blake2b(digest, key=self.digest_key, digest_size=16).hexdigest()


class Exchange:
    """One request and its answer. `run` carries it from the first byte to the last."""

    __slots__ = (
        "_connecting",
        "_on_its_way",
        "app",
        "attempt",
        "carried",
        "digest",
        "dispatch",
        "leaks",
        "link",
        "owner",
        "record",
        "reply",
        "route",
        "sequence",
        "services",
        "unread",
    )

    def __init__(self, services: Services, app: App) -> None:
        self.services = services
        self.app = app
        self.record = Record(
            services.emit, services.monotonic, services.wall, services.new_operation(), services.monotonic()
        )
        self.route: Route | None = None
        self.link: Link | None = None
        self.sequence: MessageSequence | None = None
        self.digest = b""
        self.attempt = 1
        self.carried = Carried(self.record.failed)
        self.owner: str | None = None
        self.leaks: list[Hit] | None = None
        self.unread = Reason.INTERNAL
        self._connecting: asyncio.Task[object] | None = None
        self._on_its_way = False
        self.dispatch: Dispatch | None = None
        settings = services.settings
        self.reply = Reply(app, self.record, settings.limits, settings.timeouts, services.holds)

    async def run(self) -> bool:
        """Carry the exchange through; True where the app's connection may carry another one."""
        self.app.listen(self._app_left)
        try:
            await self._exchange()
        except AppGone:
            self._app_left()
        except Exception as error:  # noqa: BLE001 - a fault of ours ends this exchange, never the process
            self.record.failed("exchange", error)
            self.record.went_wrong("unknown", "turngate_internal")
            if self.reply.started:
                self.reply.keep_alive = False
                self.app.cut()
            else:
                self.reply.fail(502, Reason.INTERNAL, "turngate failed on this request")
        finally:
            self.app.listen(None)
            self.reply.close()
            try:
                self._end()
            except Exception as error:  # noqa: BLE001 - the answer is out; what is told of it must not spoil it
                self.record.failed("record", error)
        return self.reply.keep_alive and self.app.keeps_alive and not self.app.gone

    def stop(self) -> None:
        """The process ends: give the answer up now, loudly."""
        self.reply.give_up(Ending.EOF)
        self._stop_connecting()

    def _app_left(self) -> None:
        self.app.gone = True
        if self.dispatch is not None and self.dispatch.strength == "explicit":
            self.services.ledger.cancel(self.dispatch.conversation).add_done_callback(_looked_at)
        if self.link is not None:
            self.link.abort()
        self._stop_connecting()

    def _stop_connecting(self) -> None:
        """Else it goes on for as long as the system tries: two minutes on Linux."""
        task, self._connecting = self._connecting, None
        if task is not None:
            task.cancel()

    # 1. Accept

    async def _exchange(self) -> None:
        try:
            route = self.route = self.services.routes.find(self.app.head)
        except NoRoute as error:
            self.record.went_wrong("refused", "caller_no_route")
            self.reply.fail(error.status, Reason.SURFACE_UNCOVERED, str(error))
            return
        self.record.upstream = route.target.name
        if route.dialect is None:
            self._note_uncovered(route)
            await self._relay(route)
            return
        self.record.api = route.dialect.api
        self.record.server = route.target.server
        self.record.traceparent = traceparent_of(self.app.head.headers)
        self.reply.dialect = route.dialect
        stages = self.services.ladder.possible(route.target.name, self.app.head.headers)
        if stages == {Stage.OFF} and not route.by_model:
            await self._relay(route)
        elif stages <= {Stage.OFF, Stage.OBSERVE} and not route.by_model:
            await self._observe(route, route.dialect)
        else:
            await self._enforce(route, route.dialect)

    def _note_uncovered(self, route: Route) -> None:
        """Generation that no dialect reads yet is relayed like everything else, but not silently."""
        head = self.app.head
        surface = registry.uncovered(head.method, route.path.partition("?")[0], upgrades=head.upgrades)
        if surface and self.services.ladder.possible(route.target.name, head.headers) != {Stage.OFF}:
            self.record.api = surface
            self.record.unjudged(Reason.SURFACE_UNCOVERED)

    async def _relay(self, route: Route) -> None:
        """Bytes both ways, nothing read."""
        link = await self._connect(route)
        if link is None:
            return
        await self._upload(link, route, None)
        await self._receive(link)

    async def _observe(self, route: Route, dialect: Dialect) -> None:
        """Send as the bytes come; judge what was sent while the provider thinks."""
        self._on_its_way = True
        link = await self._connect(route)
        if link is None:
            return
        kept = Kept(self.services.settings.limits.body_bytes)
        await self._upload(link, route, kept)
        await asyncio.sleep(0)  # the transport writes at the end of the loop's turn: not after our judging
        body = kept.whole()
        if body is None or not self.app.at_end:
            self.record.unjudged(Reason.LIMIT_BODY if body is None else Reason.BODY_UNDECODABLE)
        else:
            self._judge(route, dialect, body)
            if self.record.stage is not Stage.OFF:
                self._look_back(dialect, body)
                self.dispatch = self._prepared(route, State.SENT)
                self.services.ledger.record(self.dispatch)
        await self._receive(link)

    async def _enforce(self, route: Route, dialect: Dialect) -> None:
        """Read, judge, claim, then send. Also the way of requests whose model tells the upstream."""
        kept = Kept(self.services.settings.limits.body_bytes)
        kept.add(self._read_ready())
        while not self.app.at_end and not kept.full:
            kept.add(await self._read())
        body = kept.whole()
        if body is None:
            self.record.unjudged(Reason.LIMIT_BODY)
            self.record.stage = self._stage(route, "", b"")
            if not self._refused_unjudged(
                route, 413, Reason.LIMIT_BODY, "the body is larger than limits.body_bytes"
            ):
                await self._send_large(route, kept)
            return
        self.record.request_bytes = len(body)
        if route.by_model:
            route = self.route = self.services.routes.for_model(
                route, dialect.model_of(body), self.app.head.target
            )
            self.record.upstream = route.target.name
        judgement = self._judge(route, dialect, body)
        action = Action.PASS
        if self.sequence is not None:
            judgement = self._held_to_integrity(route, dialect, body, judgement)
            action = decide(self.record.stage, class_of(self.sequence), judgement.verdict)
        elif self._refused_unjudged(route, 400, self.unread, "the body cannot be read in one way only"):
            return
        if action is Action.REFUSE and self.sequence is not None:
            self._refuse(route, dialect, judgement)
        else:
            await self._send(route, body, kept.parts)

    async def _read(self) -> bytes:
        data = await self.app.read()
        self.carried.took(data)
        return data

    def _read_ready(self) -> bytes:
        data = self.app.read_ready()
        self.carried.took(data)
        return data

    # 2 to 5. Decode, judge, decide

    def _judge(self, route: Route, dialect: Dialect, body: bytes) -> Judgement:
        """Decode and judge; on any failure of ours the request is unjudged and the failure counted."""
        services, record = self.services, self.record
        began = services.monotonic()
        try:
            judged = services.judge.judge(
                dialect,
                body,
                levels.levels(dialect.api, route.target.server),
                context_of(self.app.head.headers),
            )
            record.judge_s = services.monotonic() - began
            judgement = self._judged(route, judged, body)
            if self.reply.enforced or record.stage is not Stage.OFF:
                self._expect(dialect, body, judged.sequence)
            return judgement
        except Undecodable as error:
            self.unread = error.reason
            record.unjudged(error.reason)
        except Exception as error:  # noqa: BLE001 - a rule that fails must not stop the request it looks at
            record.failed("judge", error)
            record.unjudged(Reason.INTERNAL)
        # It passes; where requests are enforced the ledger has to know of it all the same.
        record.stage = self._stage(route, "", body)
        self.digest = sha256(body).digest()
        return Judgement(Verdict.UNJUDGED)

    def _retry_count(self) -> int:
        """How often the app's SDK says it has asked before."""
        head = self.app.head
        if RETRY_COUNT not in head.names:
            return 0
        said = head.headers[head.names.index(RETRY_COUNT)][1].strip()
        return int(said) if said.isdigit() and len(said) < 4 else 0

    def _stage(self, route: Route, model: str, body: bytes) -> Stage:
        """The stage that is in force for this request now."""
        stage = self.services.ladder.stage(
            route.target.name, model, self.app.head.headers, lambda: first_turn(body)
        )
        # An order to enforce that came during the upload is for the next request: this one was sent unclaimed.
        return Stage.OBSERVE if self._on_its_way and stage.rank > Stage.OBSERVE.rank else stage

    def _judged(self, route: Route, judged: Judged, body: bytes) -> Judgement:
        """Take over what was found out about the request, and the stage it is under."""
        record, sequence, judgement = self.record, judged.sequence, judged.judgement
        record.stage = self._stage(route, sequence.model, body)
        if record.stage is Stage.OFF:
            return Judgement(Verdict.UNJUDGED)
        record.verdict = judgement.verdict
        self.sequence, self.digest = sequence, judged.digest
        digest = self.services.keyed(judged.digest)
        record.retry_of = self.services.retries.retried(
            digest, self._retry_count(), record.operation, self.services.monotonic()
        )
        self.reply.sequence = sequence
        request_class = class_of(sequence)
        self.reply.enforced = record.enforced = enforced(record.stage, request_class)
        record.request_class = request_class.value
        record.findings(judgement.findings, decide(record.stage, request_class, judgement.verdict))
        return judgement

    def _policy(self, route: Route) -> Policy:
        model = self.sequence.model if self.sequence is not None else ""
        return self.services.settings.policy(route.target.name, model, self.app.head.headers)

    def _refused_unjudged(self, route: Route, status: int, reason: Reason, what: str) -> bool:
        """Refuse what could not be judged, where the scope says so."""
        if self.record.stage.rank <= Stage.OBSERVE.rank or self._policy(route).uncovered == "pass":
            return False
        self.record.went_wrong("refused", "policy_unjudged")
        self.reply.fail(status, reason, f"{what}; nothing was sent")
        return True

    def _held_to_integrity(
        self, route: Route, dialect: Dialect, body: bytes, judgement: Judgement
    ) -> Judgement:
        """The judgement with what only the ledger knows, where the scope enforces that."""
        if not self.reply.enforced or self._policy(route).integrity == "report":
            return judgement
        self._look_back(dialect, body)
        held = refused_for(self.leaks or [], judgement)
        if held is not judgement:
            told_before = self.record.reasons
            added = held.findings[: len(held.findings) - len(judgement.findings)]
            self.record.verdict = held.verdict
            self.record.findings(added, Action.REFUSE)
            self.record.reasons += told_before
        return held

    def _expect(self, dialect: Dialect, body: bytes, sequence: MessageSequence) -> None:
        """What the answer's calls may be, and whether what was held of them may go."""
        if sequence.setting.tools is not None:
            self.reply.declared = Declared(
                lambda: dialect.declared_tools(body),
                self.services.schemas,
                enforced=self.record.stage is Stage.ENFORCE_SCHEMA,
                used_ids=sequence.call_ids,
            )
        if self.reply.enforced:
            self.reply.commit = self._commit

    def _look_back(self, dialect: Dialect, body: bytes) -> None:
        """Does the request bring back what was retracted? Slow, so it is behind the sending, and rare."""
        services, record = self.services, self.record
        if self.leaks is not None:
            return  # where integrity is enforced it has been looked at before the sending
        self.leaks = []
        try:
            owner = self._owner()
            if owner in services.marks:
                self.leaks = services.marks.find(owner, dialect.said(body))
            for hit in self.leaks:
                record.leaked(hit)
        except Exception as error:  # noqa: BLE001 - counted; the request has been sent
            record.failed("previews", error)

    def _refuse(self, route: Route, dialect: Dialect, judgement: Judgement) -> None:
        finding = judgement.findings[0]
        state = State.WAITING if judgement.verdict is Verdict.WAITING else State.REJECTED
        self.services.ledger.record(self._prepared(route, state, how=finding.reason))
        self.record.went_wrong("refused", "policy_sequence")
        trouble = Trouble(finding.reason, f"{finding.message} {finding.remedy}", finding.at)
        self.reply.answer(dialect.error(400, trouble, self.record.operation), finding.reason)

    def _prepared(self, route: Route, state: State, how: str = "") -> Dispatch:
        """The ledger's row of this exchange. A request that was not judged may have called tools."""
        now_s = self.services.wall()
        sequence = self.sequence
        without_tools = sequence is not None and not sequence.uses_tools
        conversation = self._conversation() if sequence is not None else ""
        return Dispatch(
            operation=self.record.operation
            if self.attempt == 1
            else f"{self.record.operation}.{self.attempt}",
            attempt_generation=self.attempt,
            upstream=route.target.name,
            api=self.record.api,
            model=shown_model(sequence.model) if sequence is not None else "",
            request_digest=self.services.keyed(self.digest) if self.digest else "",
            instance=self.services.instance,
            settle_s=0.0 if without_tools else self.services.settings.ledger.settle_s,
            state=state,
            how=how,
            opened_s=now_s,
            changed_s=now_s,
            ended_by=_ended_by(sequence),
            adapter=f"{self.record.api} {turngate.__version__}",
            conversation=conversation,
            strength="explicit" if conversation else "",
            revision=sequence.messages if conversation and sequence is not None else 0,
        )

    def _conversation(self) -> str:
        """The conversation as the app names it, within its owner's; "" where it names none."""
        wanted = self.services.settings.conversation_from.lower().encode()
        head = self.app.head
        if not wanted or wanted not in head.names:
            return ""
        named = head.headers[head.names.index(wanted)][1].strip().decode("latin-1")
        return f"{self._owner()}/{named[:CONVERSATION_CHARACTERS_MAX]}" if named else ""

    def _owner(self) -> str:
        if self.owner is None:
            head, services = self.app.head, self.services
            owner_from = services.settings.owner_from.lower().encode()
            self.owner = owner_of(head.headers, head.names, services.digest_key, owner_from)
        return self.owner

    # 6, 7. Claim, send

    async def _send(self, route: Route, body: bytes, parts: Sequence[bytes]) -> None:
        """Send a body that has been read, in the parts in which it came; where enforced, the ledger says so on disk first."""
        link = await self._claim_and_connect(route)
        if link is None:
            return
        self.reply.may_repeat = self._may_repeat(route)
        await self._send_on(link, route, body, parts)
        if self.reply.unanswered:
            # Its connection is closed: no channel is left by which that answer could become a turn.
            link.abort()
            self._move(State.UNKNOWN, how="asked_again")
            self.reply.begin_again()
            self.attempt += 1
            self.carried = Carried(self.record.failed)
            for part in parts:
                self.carried.took(part)
            link = await self._claim_and_connect(route)
            if link is not None:
                await self._send_on(link, route, body, parts)

    def _may_repeat(self, route: Route) -> bool:
        """Whether the scope allows a second attempt where nobody can tell the first one from none."""
        dispatch = self.dispatch
        confirmed = dispatch is not None and dispatch.ended_by == "connection_end"
        return self.reply.enforced and confirmed and self._policy(route).reattempt == "confirmed"

    async def _send_on(self, link: Link, route: Route, body: bytes, parts: Sequence[bytes]) -> None:
        link.expect_answer(informed=self.reply.inform)
        link.writelines([self._head_for(link, route), *map(self._piece, parts), self._last_piece()])
        self._move(State.SENT)
        if route.dialect is not None:
            await asyncio.sleep(0)  # the transport writes at the end of the loop's turn
            self._look_back(route.dialect, body)
        await self._receive(link)

    async def _claim_and_connect(self, route: Route) -> Link | None:
        """A connection to send on, once the ledger has what it must have; None where nothing is to be sent any more."""
        claim: asyncio.Future[None] | None = None
        began = self.services.monotonic()
        if self.record.stage is not Stage.OFF:
            self.dispatch = self._prepared(route, State.DISPATCHING)
            unjudged = self.sequence is None and self.record.stage is not Stage.OBSERVE
            if self.reply.enforced or unjudged:
                claim = self.services.ledger.claim(self.dispatch)
            else:
                self.services.ledger.record(self.dispatch)
        link = await self._connect(route, claim)  # connecting overlaps the commit
        if claim is not None and not await self._claimed(claim, began):
            return None
        if link is not None and not link.is_open:
            link = await self._connect(route)  # it ended while the claim was written; nothing was sent on it
        if link is None:
            self._move(State.UNSENT, how="app_left" if self.app.gone else "unreachable")
        elif self.app.gone:
            self._move(State.CANCELLED, how="app_left")
            link = None
        return link

    async def _claimed(self, claim: asyncio.Future[None], began: float) -> bool:
        """Wait until the claim is on disk. A ledger that is down degrades the exchange to observing."""
        try:
            await claim
        except LedgerDown as error:
            self.record.failed("ledger.claim", error)
            if self.route is not None and self._policy(self.route).ledger_down == "refuse":
                self.dispatch = None
                self.record.went_wrong("refused", "turngate_ledger_down")
                self.reply.fail(503, Reason.INTERNAL, "the ledger is down; nothing was sent", retry=True)
                return False
            self.reply.enforced = self.record.enforced = False
            if self.dispatch is not None:
                self.services.ledger.record(self.dispatch)
        except ClaimConflict as error:
            self.dispatch = None
            reason = Reason(error.refusal.reason)
            self.record.went_wrong("refused", "policy_dispatch")
            self.record.reasons = (reason.value,)
            other = f" ({error.refusal.operation})" if error.refusal.operation else ""
            self.reply.fail(409, reason, f"{error.refusal.message}{other}; nothing was sent")
            return False
        self.record.claim_s = self.services.monotonic() - began
        return True

    async def _connect(self, route: Route, claim: "asyncio.Future[None] | None" = None) -> Link | None:
        """A connection to the provider. Where there is none the app is told, and may try again."""
        try:
            link = self.link = await self._acquire(route)
        except Unreachable as error:
            if claim is not None:
                with suppress(LedgerDown, ClaimConflict):  # looked at, and counted, by who awaits it next
                    await claim
            if self.app.gone:
                return None
            self.record.went_wrong("unsent", "provider_unreachable")
            text = (
                f"cannot reach {route.target.name} ({error.cause_kind}: {error}); nothing was sent, try again"
            )
            self.reply.fail(502, Reason.DISPATCH_UNSENT, text, retry=True)
            return None
        return link

    async def _acquire(self, route: Route) -> Link:
        """A connection, unless the app leaves or the process ends first. Raises Unreachable."""
        link = self.services.pool.reuse(route.target.origin)
        if link is not None:
            return link
        limit_s = self.services.settings.timeouts.connect_s if self.reply.enforced else None
        task = self._connecting = asyncio.current_task()
        try:
            async with asyncio.timeout(limit_s):
                return await self.services.pool.acquire(route.target.origin)
        except TimeoutError as error:
            raise Unreachable("timeout", f"no connection within {limit_s:g} s") from error
        except asyncio.CancelledError as error:
            if task is None or not (self.app.gone or self.reply.ended_by_us):
                raise
            task.uncancel()  # it was ours
            raise Unreachable("other", "given up while connecting") from error
        finally:
            self._connecting = None

    def _head_for(self, link: Link, route: Route, *, expect: bool = False) -> bytes:
        gated = self.reply.enforced and self.sequence is not None and self.sequence.stream
        return wire.request_bytes(
            self.app.head, route.path, link.origin.host_header, identity=gated, expect=expect
        )

    async def _upload(self, link: Link, route: Route, kept: Kept | None) -> None:
        """Send the request as its bytes come in, up to its end or an early answer."""
        app = self.app
        app.continue_due = False  # the provider is asked, and its own word passed on
        link.expect_answer(head_request=app.head.method == "HEAD", informed=self.reply.inform)
        ready = self._read_ready()
        self.record.request_bytes = len(ready)
        if kept is not None:
            kept.add(ready)
        head = self._head_for(link, route, expect=True)
        if app.at_end:
            link.writelines([head, self._piece(ready), self._last_piece()])
            return
        link.writelines([head, self._piece(ready)])
        # An early answer (401, 413) ends the upload: it is passed on at once.
        upload = asyncio.create_task(self._upload_rest(link, kept))
        answer = asyncio.create_task(link.head())
        await asyncio.wait({upload, answer}, return_when=asyncio.FIRST_COMPLETED)
        await _cancelled(answer)
        self.reply.keep_alive = upload.done()
        await _cancelled(upload)

    async def _upload_rest(self, link: Link, kept: Kept | None) -> None:
        while data := await self._read():
            self.record.request_bytes += len(data)
            if kept is not None:
                kept.add(data)
            link.write(self._piece(data))
            await link.drain()
        link.write(self._last_piece())

    def _piece(self, data: bytes) -> bytes:
        self.carried.gave(data)
        return wire.chunk(data) if data and self.app.head.framing is Framing.CHUNKED else data

    def _last_piece(self) -> bytes:
        self.carried.whole = True
        return wire.LAST_CHUNK if self.app.head.framing is Framing.CHUNKED else b""

    async def _send_large(self, route: Route, kept: Kept) -> None:
        """A body beyond the bound: pass on what was read, then the rest, unjudged and without its digest."""
        link = await self._claim_and_connect(route)
        if link is None:
            return
        link.expect_answer(informed=self.reply.inform)
        link.writelines([self._head_for(link, route), *(self._piece(part) for part in kept.parts)])
        kept.parts.clear()
        self._move(State.SENT)
        upload = asyncio.create_task(self._upload_rest(link, None))
        try:
            await self._receive(link)
        finally:
            self.reply.keep_alive = self.reply.keep_alive and upload.done()
            await _cancelled(upload)

    # 8, 9. Assemble, gate, commit

    async def _receive(self, link: Link) -> None:
        """Give the app what may pass of the answer."""
        head = await self.reply.head(link)
        if head is not None:
            self._move(State.STREAMING)
            await (self.reply.tunnel(link, head) if head.status == 101 else self.reply.receive(link, head))

    async def _commit(self, verdict: TurnVerdict) -> bool:
        """Make this the turn of its revision, on disk; False where it may not be. A ledger that is down lets it pass."""
        dispatch = self.dispatch
        if dispatch is None or dispatch.state not in OPEN:
            return True
        assembler = self.reply.assembler
        try:
            self.dispatch = await self.services.ledger.commit(
                dispatch,
                handle=assembler.handle if assembler is not None else "",
                answered_model=assembler.model if assembler is not None else "",
                end=ENDS.get(verdict.finish or Finish.COMPLETE, "complete"),
            )
        except LedgerDown as error:
            self.record.failed("ledger.commit", error)
            return True
        return may_release(self.dispatch)

    # 10. Record

    def _move(self, to: State, *, how: str = "", end: End = "", canonical: bool = False) -> None:
        if self.dispatch is not None:
            handle = self.reply.assembler.handle if self.reply.assembler is not None else ""
            self.dispatch = self.services.ledger.move(
                self.dispatch, to, how=how, handle=handle, end=end, canonical=canonical
            )

    def _end(self) -> None:
        """Close what is open and tell what happened, once."""
        record = self.record
        if self.link is not None:
            self.link.release()
        if record.api:
            record.client = client_family(self.app.head.headers)
        self.reply.read_success()
        verdict = self.reply.verdict
        ended_well = verdict is not None and verdict.turn in ENDED_WELL
        if self.app.gone and not ended_well:
            record.went_wrong("client_gone", "caller_gone")
        elif verdict is not None and verdict.turn is Turn.INCOMPLETE:
            record.went_wrong("incomplete", "")
        elif verdict is not None and not ended_well:
            record.retracted(verdict, self.app.written_bytes)
        if verdict is not None and self.reply.assembler is not None:
            record.calls(verdict, len(self.reply.assembler.calls))
            for reason in self.reply.assembler.anomalies:
                record.anomaly(reason)
                if reason is Reason.STREAM_AFTER_STOP and self.dispatch is not None:
                    late = LateEvent(
                        operation=record.operation,
                        at_s=self.services.wall(),
                        event=reason,
                        handle=self.reply.assembler.handle,
                    )
                    self.services.ledger.quarantine(late)
        for witness, detail in self.reply.witnessed():
            record.witnessed(witness, detail)
        if record.api and not self.app.gone and (detail := self.carried.mismatch):
            record.witnessed("byte_mismatch", detail)
        self._settle(verdict)
        if verdict is not None and not self.app.gone:
            self._remember(verdict)
        assembler = self.reply.assembler
        finish = verdict.finish.value if verdict is not None and verdict.finish is not None else ""
        record.ended(self.sequence, self.app.written_bytes, assembler, finish)

    def _remember(self, verdict: TurnVerdict) -> None:
        """Keep what of a retracted turn may come back as history; take off what this turn says in its own right."""
        marks, calls = self.services.marks, self.reply.withheld_calls
        preview = self.reply.preview
        if self.leaks is None:
            return  # the request never left
        owner = self._owner()
        if verdict.turn in (Turn.RETRACTED, Turn.UNKNOWN):
            cause = verdict.reason or Reason.INTERNAL
            named = [(call.id, call.name) for call in calls]
            marks.add(owner, self.record.operation, cause, preview, named, told=self.reply.enforced)
        elif verdict.turn is Turn.COMMITTED and owner in marks:
            text = preview.text() if preview is not None else ""
            marks.committed(owner, text, [call.id for call in verdict.calls])

    def _settle(self, verdict: TurnVerdict | None) -> None:
        """The dispatch's last move in this exchange."""
        if self.dispatch is None or self.dispatch.state not in OPEN:
            return
        record = self.record
        if verdict is not None and verdict.turn in ENDED_WELL:
            end = ENDS.get(verdict.finish or Finish.COMPLETE, "complete")
            self._move(State.COMMITTED, end=end, canonical=verdict.turn is Turn.COMMITTED)
        elif self.app.gone:
            self._move(State.CANCELLED, how="app_left")
        elif record.outcome == "provider_error":
            self._move(State.REFUSED, how=f"status_{record.status}")
        elif verdict is None and record.outcome == "passed":
            self._move(State.COMMITTED, end="complete", how="unjudged")
        elif verdict is not None and verdict.reason is Reason.STREAM_ERROR_EVENT:
            self._move(State.REFUSED, how="error_event")
        else:
            self._move(State.UNKNOWN, how=(verdict.reason if verdict else None) or record.error_type)


def _looked_at(asked: "asyncio.Future[int]") -> None:
    """Nobody waits for the answer; that there is none is counted by the ledger itself."""
    if not asked.cancelled():
        asked.exception()


def _ended_by(sequence: MessageSequence | None) -> EndedBy:
    """What confirms that an attempt has ended. Of tools that a provider runs at a third party nobody can tell."""
    tools = sequence.setting.tools if sequence is not None else None
    return "never" if tools and any(tool.wire.startswith("mcp") for tool in tools) else "connection_end"


async def _cancelled(task: asyncio.Task[Head] | asyncio.Task[None]) -> None:
    """End a task of ours. What it raised is told by the link it worked on, but for the app's leaving."""
    task.cancel()
    with suppress(asyncio.CancelledError, Broken):
        await task
