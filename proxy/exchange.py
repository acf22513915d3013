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
from hashlib import blake2b
from typing import Final

from turngate.adapters import coding, levels
from turngate.adapters.dialect import Answer, Dialect, Trouble, Undecodable
from turngate.adapters.registry import CHAT
from turngate.proxy import wire
from turngate.proxy.app_side import App, AppGone, Tunnel
from turngate.proxy.config import Settings
from turngate.proxy.judging import Judge
from turngate.proxy.ledger_sqlite import ClaimConflict, Ledger, LedgerDown
from turngate.proxy.record import Record
from turngate.proxy.rollout import Action, Ladder, RequestClass, Stage, decide, enforced
from turngate.proxy.routes import NoRoute, Route, Routes
from turngate.proxy.upstream import Broken, Head, Link, Pool, Unreachable
from turngate.proxy.wire import Framing
from turngate.telemetry.events import AnyEvent
from turngate.validators.gate import Gate
from turngate.validators.graph import MessageSequence
from turngate.validators.ledger import OPEN, Dispatch, End, State
from turngate.validators.rules import Judgement, Reason, Verdict
from turngate.validators.stream import Assembler, Ending, Finish, Turn, TurnVerdict

ENDINGS: Final = {"eof": Ending.EOF, "bad_framing": Ending.EOF, "reset": Ending.RESET, "aborted": Ending.LEFT}
ENDS: Final[dict[Finish, End]] = {Finish.TRUNCATED: "truncated", Finish.FILTERED: "filtered"}
ENDED_WELL: Final = frozenset({Turn.COMMITTED, Turn.INCOMPLETE})

RETRACTED: Final = (
    "the provider's answer did not end well; drop what you have of it and send the request again"
)


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

    def keyed(self, digest: bytes) -> str:
        """What files hold of a sha256: without the key a short text cannot be guessed from it."""
        return blake2b(digest, key=self.digest_key, digest_size=16).hexdigest()


class Exchange:
    """One request and its answer. `run` carries it from the first byte to the last."""

    __slots__ = (
        "_active_s",
        "_started",
        "_watchdog",
        "app",
        "assembler",
        "digest",
        "dispatch",
        "ended_by_us",
        "enforced",
        "gate",
        "keep_alive",
        "link",
        "record",
        "route",
        "sequence",
        "services",
        "verdict",
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
        self.dispatch: Dispatch | None = None
        self.gate: Gate | None = None
        self.assembler: Assembler | None = None
        self.verdict: TurnVerdict | None = None
        self.enforced = False
        self.keep_alive = True
        self.ended_by_us: Ending | None = None
        self._started = False
        self._active_s = 0.0
        self._watchdog: asyncio.TimerHandle | None = None

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
            if self._started:
                self.keep_alive = False
                self.app.cut()
            else:
                self._answer_error(502, Reason.INTERNAL, "turngate failed on this request")
        finally:
            self.app.listen(None)
            if self._watchdog is not None:
                self._watchdog.cancel()
            self._end()
        return self.keep_alive and self.app.keeps_alive and not self.app.gone

    def stop(self) -> None:
        """The process ends: give the answer up now, loudly."""
        self._give_up(Ending.EOF)

    def _give_up(self, ending: Ending) -> None:
        """Close the provider's side; what waits for it goes on with this ending."""
        if not self.app.gone:
            self.ended_by_us = ending
        if self.link is not None:
            self.link.abort()

    def _app_left(self) -> None:
        self.app.gone = True
        if self.link is not None:
            self.link.abort()

    # 1. Accept

    async def _exchange(self) -> None:
        try:
            route = self.route = self.services.routes.find(self.app.head)
        except NoRoute as error:
            self.record.went_wrong("refused", "caller_no_route")
            self._answer_error(error.status, Reason.SURFACE_UNCOVERED, str(error))
            return
        self.record.upstream = route.target.name
        if route.dialect is None:
            await self._relay(route)
            return
        self.record.api = route.dialect.api
        stages = self.services.ladder.possible(route.target.name)
        if stages == {Stage.OFF}:
            await self._relay(route)
        elif stages <= {Stage.OFF, Stage.OBSERVE}:
            await self._observe(route, route.dialect)
        else:
            await self._enforce(route, route.dialect)

    async def _relay(self, route: Route) -> None:
        """Bytes both ways, nothing read."""
        link = await self._connect(route)
        if link is None:
            return
        await self._upload(link, route, None)
        if self.app.head.upgrades:
            await self._tunnel(link)
        else:
            await self._receive(link)

    async def _tunnel(self, link: Link) -> None:
        """A connection that may become another protocol's: raw bytes both ways from the 101 on."""
        try:
            head = await link.head()
        except Broken as broken:
            self._no_head(broken)
            return
        if head.status != 101:
            self.record.status = head.status
            await self._pass(link, head)
            return
        self.record.status, self.keep_alive = head.status, False
        self._start(head, Framing.NONE)
        upwards = asyncio.create_task(_pump(self.app.tunnel(), link))
        try:
            while data := await link.read():
                self.app.send(data)
                if self.app.slow:
                    await self.app.writable()
        except Broken as broken:
            if not self.app.gone:
                self.record.went_wrong("retracted", f"provider_{broken.kind}")
        await _cancelled(upwards)

    async def _observe(self, route: Route, dialect: Dialect) -> None:
        """Send as the bytes come; judge what was sent while the provider thinks."""
        link = await self._connect(route)
        if link is None:
            return
        kept = _Kept(self.services.settings.limits.body_bytes)
        await self._upload(link, route, kept)
        await asyncio.sleep(0)  # the transport writes at the end of the loop's turn: not after our judging
        body = kept.whole()
        if body is None or not self.app.at_end:
            self.record.unjudged(Reason.LIMIT_BODY if body is None else Reason.BODY_UNDECODABLE)
        else:
            self._judge(route, dialect, body)
            if self.sequence is not None:
                self.dispatch = self._prepared(route, self.sequence, State.SENT)
                self.services.ledger.record(self.dispatch)
        await self._receive(link)

    async def _enforce(self, route: Route, dialect: Dialect) -> None:
        """Read, judge, claim, then send."""
        kept = _Kept(self.services.settings.limits.body_bytes)
        kept.add(self.app.read_ready())
        while not self.app.at_end and not kept.full:
            kept.add(await self.app.read())
        body = kept.whole()
        if body is None:
            self.record.unjudged(Reason.LIMIT_BODY)
            await self._send_large(route, kept)
            return
        self.record.request_bytes = len(body)
        judgement = self._judge(route, dialect, body)
        action = Action.PASS
        if self.sequence is not None:
            action = decide(self.record.stage, _class_of(self.sequence), judgement.verdict)
        if action is Action.REFUSE and self.sequence is not None:
            self._refuse(route, dialect, self.sequence, judgement)
        else:
            await self._send(route, body)

    # 2 to 5. Decode, judge, decide

    def _judge(self, route: Route, dialect: Dialect, body: bytes) -> Judgement:
        """Decode and judge; on any failure of ours the request is unjudged and the failure counted."""
        services, record = self.services, self.record
        began = services.monotonic()
        try:
            judged = services.judge.judge(dialect, body, levels.levels(dialect.api, route.target.server))
        except Undecodable:
            record.unjudged(Reason.BODY_UNDECODABLE)
            return Judgement(Verdict.UNJUDGED)
        except Exception as error:  # noqa: BLE001 - a rule that fails must not stop the request it looks at
            record.failed("judge", error)
            record.unjudged(Reason.INTERNAL)
            return Judgement(Verdict.UNJUDGED)
        record.judge_s = services.monotonic() - began
        sequence, judgement = judged.sequence, judged.judgement
        record.stage = services.ladder.stage(route.target.name, sequence.model)
        if record.stage is Stage.OFF:
            return Judgement(Verdict.UNJUDGED)
        record.verdict = judgement.verdict
        self.sequence, self.digest = sequence, judged.digest
        request_class = _class_of(sequence)
        self.enforced = record.enforced = enforced(record.stage, request_class)
        record.findings(judgement.findings, decide(record.stage, request_class, judgement.verdict))
        return judgement

    def _refuse(
        self, route: Route, dialect: Dialect, sequence: MessageSequence, judgement: Judgement
    ) -> None:
        finding = judgement.findings[0]
        state = State.WAITING if judgement.verdict is Verdict.WAITING else State.REJECTED
        self.services.ledger.record(self._prepared(route, sequence, state, how=finding.reason))
        self.record.went_wrong("refused", "policy_sequence")
        trouble = Trouble(finding.reason, f"{finding.message} {finding.remedy}", finding.at)
        self._answer(dialect.error(400, trouble, self.record.operation), finding.reason)

    def _prepared(self, route: Route, sequence: MessageSequence, state: State, how: str = "") -> Dispatch:
        now_s = self.services.wall()
        return Dispatch(
            operation=self.record.operation,
            upstream=route.target.name,
            api=sequence.api,
            model=sequence.model,
            request_digest=self.services.keyed(self.digest),
            instance=self.services.instance,
            settle_s=self.services.settings.ledger.settle_s if sequence.uses_tools else 0.0,
            state=state,
            how=how,
            opened_s=now_s,
            changed_s=now_s,
        )

    # 6, 7. Claim, send

    async def _send(self, route: Route, body: bytes) -> None:
        """Send a body that has been read; where enforced, the ledger says so on disk first."""
        claim: asyncio.Future[None] | None = None
        began = self.services.monotonic()
        if self.sequence is not None:
            self.dispatch = self._prepared(route, self.sequence, State.DISPATCHING)
            if self.enforced:
                claim = self.services.ledger.claim(self.dispatch)
            else:
                self.services.ledger.record(self.dispatch)
        link = await self._connect(route, claim)  # connecting overlaps the commit
        if claim is not None and not await self._claimed(claim, began):
            return
        if link is None:
            self._move(State.UNSENT, how="unreachable")
            return
        if self.app.gone:
            self._move(State.CANCELLED, how="app_left")
            return
        link.expect_answer()
        link.writelines([self._head_for(link, route), self._piece(body), self._last_piece()])
        self._move(State.SENT)
        await self._receive(link)

    async def _claimed(self, claim: asyncio.Future[None], began: float) -> bool:
        """Wait until the claim is on disk. A ledger that is down degrades the exchange to observing."""
        try:
            await claim
        except LedgerDown as error:
            self.record.failed("ledger.claim", error)
            self.enforced = self.record.enforced = False
            if self.dispatch is not None:
                self.services.ledger.record(self.dispatch)
        except ClaimConflict as error:
            self.record.failed("ledger.claim", error)
            self.dispatch = None
            self.record.went_wrong("refused", "policy_dispatch")
            self._answer_error(409, Reason.DISPATCH_CONFLICT, "this operation has been claimed already")
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
            self.record.went_wrong("unsent", "provider_unreachable")
            text = f"cannot reach {route.target.name} ({error.cause_kind}); nothing was sent, try again"
            self._answer_error(502, Reason.DISPATCH_UNSENT, text, retry=True)
            return None
        return link

    async def _acquire(self, route: Route) -> Link:
        pool, limit_s = self.services.pool, self.services.settings.timeouts.connect_s
        if not self.enforced:
            return await pool.acquire(route.target.origin)
        try:
            async with asyncio.timeout(limit_s):
                return await pool.acquire(route.target.origin)
        except TimeoutError as error:
            raise Unreachable("timeout", f"no connection within {limit_s:g} s") from error

    def _head_for(self, link: Link, route: Route) -> bytes:
        gated = self.enforced and self.sequence is not None and self.sequence.stream
        return wire.request_bytes(self.app.head, route.path, link.origin.host_header, identity=gated)

    async def _upload(self, link: Link, route: Route, kept: "_Kept | None") -> None:
        """Send the request as its bytes come in, up to its end or an early answer."""
        app = self.app
        link.expect_answer(head_request=app.head.method == "HEAD")
        ready = app.read_ready()
        self.record.request_bytes = len(ready)
        if kept is not None:
            kept.add(ready)
        if app.at_end:
            link.writelines([self._head_for(link, route), self._piece(ready), self._last_piece()])
            return
        link.writelines([self._head_for(link, route), self._piece(ready)])
        # An early answer (401, 413) ends the upload: it is passed on at once.
        upload = asyncio.create_task(self._upload_rest(link, kept))
        answer = asyncio.create_task(link.head())
        await asyncio.wait({upload, answer}, return_when=asyncio.FIRST_COMPLETED)
        await _cancelled(answer)
        self.keep_alive = upload.done()
        await _cancelled(upload)

    async def _upload_rest(self, link: Link, kept: "_Kept | None") -> None:
        while data := await self.app.read():
            self.record.request_bytes += len(data)
            if kept is not None:
                kept.add(data)
            link.write(self._piece(data))
            await link.drain()
        link.write(self._last_piece())

    def _piece(self, data: bytes) -> bytes:
        return wire.chunk(data) if data and self.app.head.framing is Framing.CHUNKED else data

    def _last_piece(self) -> bytes:
        return wire.LAST_CHUNK if self.app.head.framing is Framing.CHUNKED else b""

    async def _send_large(self, route: Route, kept: "_Kept") -> None:
        """A body beyond the bound: pass on what was read, then the rest, unjudged."""
        link = await self._connect(route)
        if link is None:
            return
        link.expect_answer()
        link.writelines([self._head_for(link, route), *(self._piece(part) for part in kept.parts)])
        kept.parts.clear()
        upload = asyncio.create_task(self._upload_rest(link, None))
        try:
            await self._receive(link)
        finally:
            self.keep_alive = self.keep_alive and upload.done()
            await _cancelled(upload)

    # 8, 9. Assemble, gate, commit

    async def _receive(self, link: Link) -> None:
        """Take the answer and give the app what may pass."""
        record, sequence = self.record, self.sequence
        if self.enforced:
            self._active_s = self.services.monotonic()
            self._watch_silence(self.services.settings.timeouts.first_byte_s)
        try:
            head = await link.head()
        except Broken as broken:
            self._no_head(broken)
            return
        record.first_byte_s = self.services.monotonic() - record.started_s
        record.status = head.status
        self._move(State.STREAMING)
        if sequence is None or self.route is None or self.route.dialect is None:
            await self._pass(link, head)
        elif not 200 <= head.status < 300:
            record.went_wrong("provider_error", _error_type(head.status))
            await self._pass(link, head)
        elif (head.get(b"content-type") or b"").startswith(b"text/event-stream"):
            await self._pass_stream(link, head, sequence, self.route.dialect)
        else:
            await self._pass_whole(link, head, sequence, self.route.dialect)

    def _watch_silence(self, after_s: float) -> None:
        self._watchdog = asyncio.get_running_loop().call_later(after_s, self._silent)

    def _silent(self) -> None:
        """A limit may have passed; one timer serves the whole answer, so that a delta costs no timer."""
        timeouts = self.services.settings.timeouts
        limit_s = timeouts.idle_s if self._started else timeouts.first_byte_s
        # While the app does not read, the provider cannot write: that pause is not its own.
        silent_s = 0.0 if self.app.slow else self.services.monotonic() - self._active_s
        if silent_s >= limit_s:
            self._give_up(Ending.STALLED)
        else:
            self._watch_silence(limit_s - silent_s)

    def _no_head(self, broken: Broken) -> None:
        """The provider's side ended before an answer began. Whether it worked on the request, nobody knows."""
        self.keep_alive = False
        if self.app.gone:
            return
        self.record.went_wrong("unknown", "provider_closed")
        if self.ended_by_us is Ending.STALLED:
            text = (
                "the provider sent nothing for longer than timeouts.first_byte_s; it may have run the request"
            )
            self._answer_error(504, Reason.STREAM_STALLED, text)
        elif self.enforced or self.ended_by_us is not None:
            text = f"the provider's connection ended before its answer ({broken.kind}); it may have run the request"
            self._answer_error(502, Reason.DISPATCH_UNKNOWN_OUTCOME, text)
        else:
            self.app.cut()  # the app's SDK acts as it would alone

    async def _pass_stream(self, link: Link, head: Head, sequence: MessageSequence, dialect: Dialect) -> None:
        """A streamed answer through the gate: held where enforced, watched elsewhere."""
        parser = dialect.open_stream(sequence)
        encoding = (head.get(b"content-encoding") or b"identity").strip().lower()
        plain = encoding == b"identity"
        self.assembler = Assembler(sequence.choices, parser.closes_calls)
        gate = self.gate = Gate(
            parser,
            self.assembler,
            holds=self.enforced and plain,
            held_bytes_max=self.services.settings.limits.hold_bytes,
            retraction=lambda reason: dialect.stream_error(Trouble(reason, RETRACTED)),
        )
        if gate.holds:
            await self._pass_held(link, head, gate)
            return
        decoder = None if plain else coding.open_decoder(encoding)
        if plain or decoder is not None:
            await self._pass(link, head, _Watch(gate.receive, decoder))
        else:
            gate.blind = True
            await self._pass(link, head)

    async def _pass(
        self, link: Link, head: Head, watch: "_Watch | None" = None, first: Sequence[bytes] = ()
    ) -> None:
        """Every byte as it comes, after the `first` that were read already; `watch` sees them afterwards."""
        app = self.app
        framing = self._framing(head)
        self._start(head, framing)
        for data in first:
            app.send(data)
        ending = Ending.CLEAN
        try:
            while data := await link.read():
                app.send(data)
                if watch is not None and not self._seen(watch, data):
                    watch = None
                if app.slow:
                    await app.writable()
                self._active_s = self.services.monotonic()
        except Broken as broken:
            ending = self.ended_by_us or ENDINGS[broken.kind]
        self._watched(ending)
        if ending is Ending.CLEAN:
            app.end()
            self.keep_alive = self.keep_alive and framing is not Framing.CLOSE
            self._give_back(link)
        else:
            self.keep_alive = False
            if not app.gone:
                self.record.went_wrong("retracted", "provider_stream_broken")
                app.cut()

    async def _pass_held(self, link: Link, head: Head, gate: Gate) -> None:
        """What the gate lets through, and an error in the dialect's shape where the turn does not end well."""
        app = self.app
        framing = self._framing(head)
        if framing is Framing.LENGTH and app.takes_chunks:
            framing = Framing.CHUNKED  # the gate may withhold bytes
        self._start(head, framing)
        ending = Ending.CLEAN
        try:
            while not gate.over and (data := await link.read()):
                out = gate.receive(data)
                self.record.holding(gate.held_bytes)
                if out:
                    app.send(out)
                if app.slow:
                    await app.writable()
                self._active_s = self.services.monotonic()
        except Broken as broken:
            ending = self.ended_by_us or ENDINGS[broken.kind]
        tail = gate.finish(ending)
        self.record.holding(0)
        if not app.gone:
            if tail:
                app.send(tail)
            app.end()
        self.keep_alive = self.keep_alive and framing is not Framing.CLOSE
        if gate.over or ending is not Ending.CLEAN:
            link.abort()
        else:
            self._give_back(link)

    async def _pass_whole(self, link: Link, head: Head, sequence: MessageSequence, dialect: Dialect) -> None:
        """A whole JSON answer: where calls are enforced judged before its first byte goes on, elsewhere after its last."""
        kept = _Kept(self.services.settings.limits.body_bytes)
        if not (self.enforced and _class_of(sequence) is RequestClass.TOOLS):
            await self._pass(link, head, _Watch(kept.add, None))
            body = kept.whole()
            if body is not None and self.record.outcome == "passed" and not self.app.gone:
                self.verdict = self._judge_whole(head, sequence, dialect, body)
            return
        try:
            while not kept.full and (data := await link.read()):
                kept.add(data)
                self._active_s = self.services.monotonic()
        except Broken as broken:
            stalled = self.ended_by_us is Ending.STALLED
            reason = Reason.STREAM_STALLED if stalled else Reason.STREAM_TRUNCATED
            self.verdict = TurnVerdict(Turn.UNKNOWN if stalled else Turn.RETRACTED, reason)
            self._withhold(f"the provider's answer broke off ({broken.kind})", reason)
            return
        body = kept.whole()
        if body is None:
            self.record.unjudged(Reason.LIMIT_BODY)
        else:
            verdict = self.verdict = self._judge_whole(head, sequence, dialect, body)
            if verdict is not None and verdict.turn not in ENDED_WELL:
                self._withhold("the provider's answer cannot be used", verdict.reason or Reason.INTERNAL)
                return
        await self._pass(link, head, first=kept.parts)

    def _withhold(self, what: str, reason: Reason) -> None:
        if not self.app.gone:
            self._answer_error(502, reason, f"{what}; nothing of it was delivered")

    def _judge_whole(
        self, head: Head, sequence: MessageSequence, dialect: Dialect, body: bytes
    ) -> TurnVerdict | None:
        """The verdict on a whole JSON answer, by the code that judges streams; None where it cannot be read."""
        encoding = (head.get(b"content-encoding") or b"identity").strip().lower()
        assembler = Assembler(sequence.choices)
        try:
            if encoding != b"identity":
                decoder = coding.open_decoder(encoding)
                if decoder is None:
                    self.record.unjudged(Reason.SURFACE_UNCOVERED)
                    return None
                body = decoder.feed(body)
            for event in dialect.parse_answer(body):
                assembler.receive(event)
        except (Undecodable, coding.CodingError):
            self.record.unjudged(Reason.BODY_UNDECODABLE)
            return None
        except Exception as error:  # noqa: BLE001 - what is only watched goes on whatever breaks here
            self.record.failed("gate", error)
            return None
        self.assembler = assembler
        return assembler.close(Ending.CLEAN)

    def _start(self, head: Head, framing: Framing) -> None:
        """Pass the answer's head on."""
        self._started = True
        close = framing is Framing.CLOSE or not self.keep_alive or not self.app.keeps_alive
        extra = [(b"x-turngate-operation", self.record.operation.encode())] if self.enforced else []
        self.app.start(wire.answer_bytes(head, framing, close=close, extra=extra), framing)

    def _framing(self, head: Head) -> Framing:
        """The answer's framing on the app's side: the upstream's, as far as the app's HTTP version has it."""
        if self.app.head.method == "HEAD" or head.status in (204, 304):
            return Framing.NONE
        if head.chunked:
            return Framing.CHUNKED if self.app.takes_chunks else Framing.CLOSE
        return Framing.CLOSE if head.content_length is None else Framing.LENGTH

    def _seen(self, watch: "_Watch", data: bytes) -> bool:
        """Judge bytes that have been passed on; False where that is not possible any more."""
        try:
            watch.see(data)
            return True
        except coding.CodingError as error:
            self.record.failed("coding", error)
        except Exception as error:  # noqa: BLE001 - what is only watched goes on whatever breaks here
            self.record.failed("gate", error)
        if self.gate is not None:
            self.gate.blind = True
        return False

    def _watched(self, ending: Ending) -> None:
        """The last word on a watched stream."""
        if self.gate is None:
            return
        if self.gate.blind:
            self.record.unjudged(Reason.SURFACE_UNCOVERED)
            return
        try:
            self.gate.finish(ending)
        except Exception as error:  # noqa: BLE001 - what is only watched goes on whatever breaks here
            self.record.failed("gate", error)

    def _give_back(self, link: Link) -> None:
        """To the pool, unless the request was not written in full."""
        if self.app.at_end:
            link.release()
        else:
            link.abort()

    # Answers of our own

    def _answer_error(self, status: int, reason: Reason, message: str, *, retry: bool = False) -> None:
        dialect = self.route.dialect if self.route is not None and self.route.dialect is not None else CHAT
        answer = dialect.error(status, Trouble(reason, message), self.record.operation, retry=retry)
        self._answer(answer, reason)

    def _answer(self, answer: Answer, reason: Reason) -> None:
        """Answer in the provider's stead, with the marks that say so."""
        self._started = True
        self.record.status = answer.status
        self.keep_alive = self.keep_alive and self.app.at_end
        headers: Sequence[tuple[str, str]] = [
            *answer.headers.items(),
            ("x-turngate-operation", self.record.operation),
            ("x-turngate-reason", reason),
        ]
        close = not self.keep_alive or not self.app.keeps_alive
        self.app.start(wire.own_head(answer.status, headers, len(answer.body), close=close), Framing.LENGTH)
        self.app.send(answer.body)

    # 10. Record

    def _move(self, to: State, *, how: str = "", end: End = "", canonical: bool = False) -> None:
        if self.dispatch is not None:
            handle = self.assembler.handle if self.assembler is not None else ""
            self.dispatch = self.services.ledger.move(
                self.dispatch, to, how=how, handle=handle, end=end, canonical=canonical
            )

    def _end(self) -> None:
        """Close what is open and tell what happened, once."""
        record = self.record
        if self.link is not None:
            self.link.release()
        verdict = self.gate.verdict if self.gate is not None else self.verdict
        ended_well = verdict is not None and verdict.turn in ENDED_WELL
        if self.app.gone and not ended_well:
            record.went_wrong("client_gone", "caller_gone")
        elif verdict is not None and verdict.turn is Turn.INCOMPLETE:
            record.went_wrong("incomplete", "")
        elif verdict is not None and not ended_well:
            record.retracted(verdict, self.app.written_bytes)
        if verdict is not None and self.assembler is not None:
            record.calls(verdict, len(self.assembler.calls))
        self._settle(verdict)
        record.ended(self.sequence, self.app.written_bytes)

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


class _Kept:
    """Bytes kept aside up to a bound. Beyond it `full` is true and nothing more is kept."""

    __slots__ = ("full", "left", "parts")

    def __init__(self, bytes_max: int) -> None:
        self.parts: list[bytes] = []
        self.left = bytes_max
        self.full = False

    def add(self, data: bytes) -> None:
        if not self.full:
            self.parts.append(data)
            self.left -= len(data)
            self.full = self.left < 0

    def whole(self) -> bytes | None:
        """All of it, or None where it was too much."""
        if self.full:
            return None
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


@dataclass(frozen=True, slots=True)
class _Watch:
    """A reader beside the bytes."""

    receive: Callable[[bytes], object]
    decoder: coding.Decoder | None

    def see(self, data: bytes) -> None:
        """Raises coding.CodingError."""
        self.receive(self.decoder.feed(data) if self.decoder is not None else data)


async def _pump(tunnel: Tunnel, link: Link) -> None:
    """The app's bytes to the provider until one of them closes."""
    while data := await tunnel.read():
        link.write(data)
        await link.drain()
    link.abort()


async def _cancelled(task: asyncio.Task[Head] | asyncio.Task[None]) -> None:
    """End a task of ours. What it raised is told by the link it worked on, but for the app's leaving."""
    task.cancel()
    with suppress(asyncio.CancelledError, Broken):
        await task


def _class_of(sequence: MessageSequence) -> RequestClass:
    return RequestClass.TOOLS if sequence.uses_tools else RequestClass.TEXT


def _error_type(status: int) -> str:
    """Whose fault an error status is."""
    if status >= 500:
        return "provider_error"
    return {
        401: "caller_auth",
        403: "caller_auth",
        404: "caller_not_found",
        413: "caller_too_large",
        429: "provider_rate_limit",
    }.get(status, "caller_invalid_request")
