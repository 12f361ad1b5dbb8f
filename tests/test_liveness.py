"""The table of peers and the handshake, without a bus."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.config import EngineConfig
from shared.liveness import TRANSITIONS, Event, Liveness, Membership, State
from shared.messages import DEAD_SECONDS, HEARTBEAT_SECONDS, Heartbeat, Hello, Welcome
from shared.model_info import ModelInfo

MODEL = ModelInfo(path="", architecture="X", vocab_size=8, max_model_len=8, eos_token_ids=[], dtype="float32")


def member(now: float = 0.0) -> Membership:
    membership = Membership(Hello(role="api", name="host:1"), now)
    membership.connected(now)
    membership.welcome(Welcome(epoch=7, engine=EngineConfig(), model=MODEL))
    return membership


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["heard", "remove", "look"]), st.floats(0, 2))))
def test_table_agrees_with_a_plain_model(steps: list[tuple[str, str, float]]) -> None:
    table: Liveness[str] = Liveness(DEAD_SECONDS)
    model: dict[str, float] = {}
    now = 0.0
    for peer, action, passed in steps:
        now += passed
        if action == "heard":
            table.heard(peer, now)
            model[peer] = now
        elif action == "remove":
            table.remove(peer)
            model.pop(peer, None)
        else:
            dead = {p for p, heard in model.items() if now - heard >= DEAD_SECONDS}
            assert set(table.take_dead(now)) == dead
            model = {p: heard for p, heard in model.items() if p not in dead}
        assert len(table) == len(model)
        assert all((p in table) == (p in model) for p in "abc")


def test_hello_on_every_connection_and_heartbeats_once_welcome() -> None:
    hello = Hello(role="api", name="host:1")
    membership = Membership(hello, 0.0)
    assert membership.tick(0.0) == []
    assert membership.connected(0.1) == [hello]
    assert not membership.is_member
    membership.welcome(Welcome(epoch=7, engine=EngineConfig(), model=MODEL))
    assert membership.is_member
    assert membership.tick(0.1) == []
    assert membership.tick(0.1 + HEARTBEAT_SECONDS) == [Heartbeat(epoch=7)]
    membership.disconnected()
    assert not membership.is_member
    assert membership.tick(5.0) == []
    assert membership.connected(6.0) == [hello]


def test_a_lost_hello_is_said_again() -> None:
    membership = Membership(Hello(role="api", name="host:1"), 0.0)
    membership.connected(0.0)
    assert membership.tick(HEARTBEAT_SECONDS / 2) == []
    assert membership.tick(HEARTBEAT_SECONDS) == [membership.hello]


def test_silence_of_the_scheduler_ends_membership() -> None:
    membership = member()
    now = 0.0
    while now + HEARTBEAT_SECONDS < DEAD_SECONDS:
        now += HEARTBEAT_SECONDS
        assert membership.tick(now) == [Heartbeat(epoch=7)]
    assert membership.tick(DEAD_SECONDS) == [membership.hello]
    assert not membership.is_member


def test_any_word_from_the_scheduler_breaks_the_silence() -> None:
    membership = member()
    membership.heard(2 * DEAD_SECONDS)
    assert membership.tick(2 * DEAD_SECONDS) == [Heartbeat(epoch=7)]


def test_unknown_is_answered_with_hello_once() -> None:
    membership = member()
    assert membership.unknown() == [membership.hello]
    assert membership.unknown() == []


@given(st.lists(st.sampled_from(list(Event))))
def test_a_member_is_always_connected_and_welcome(events: list[Event]) -> None:
    """Whatever the order, membership means: since the last UP, DOWN, Unknown or silence came a Welcome."""
    membership = Membership(Hello(role="api", name="host:1"), 0.0)
    connected = welcome = False
    for event in events:
        membership._on(event)
        if event is Event.UP:
            connected, welcome = True, False
        elif event is Event.DOWN:
            connected = welcome = False
        elif event in (Event.UNKNOWN, Event.SILENCE):
            welcome = False
        elif event is Event.WELCOME:
            welcome = connected
        assert membership.is_member == welcome
        assert (membership.state is State.APART) == (not connected)


def test_every_state_is_left_when_the_link_goes_down() -> None:
    for state in (State.GREETING, State.MEMBER):
        assert TRANSITIONS[state, Event.DOWN][0] is State.APART
