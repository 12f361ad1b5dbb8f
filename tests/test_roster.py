"""The table of members and the Hellos it refuses."""

from __future__ import annotations

from services.scheduler.roster import BACK_ROLES, FRONT_ROLES, Roster, refusal
from shared.messages import DEAD_SECONDS, PROTOCOL, Hello, Peer


def hello(role: str, address: str = "") -> Hello:
    return Hello(role=role, name=f"{role}:1", address=address, instance=f"{role}-instance")


def test_members_by_role_and_name() -> None:
    roster = Roster()
    roster.add(b"a", hello("api"), 0.0)
    roster.add(b"t", hello("tokenizer", "ipc:///d/tok"), 0.0)
    roster.add(b"l", hello("tokenizer"), 0.0)
    assert roster.of("api") == [b"a"]
    assert roster.of("tokenizer") == [b"t", b"l"]
    assert roster.tokenizers() == [Peer("tokenizer-instance", "ipc:///d/tok")]
    assert (roster.name(b"a"), roster.name(b"\xff")) == ("api api:1", "\ufffd")
    assert roster.remove(b"a") == hello("api")
    assert roster.remove(b"a") is None
    assert b"a" not in roster
    assert not roster.heard(b"a", 1.0)


def test_the_silent_are_named() -> None:
    roster = Roster()
    roster.add(b"a", hello("api"), 0.0)
    roster.add(b"b", hello("api"), 0.0)
    assert roster.heard(b"a", 1.0)
    assert roster.silent(DEAD_SECONDS) == [b"b"]
    assert roster.silent(DEAD_SECONDS + 1.0) == [b"a"]


def test_what_does_not_belong_is_refused() -> None:
    assert refusal(hello("api"), FRONT_ROLES) == ""
    assert refusal(hello("worker"), BACK_ROLES) == ""
    assert "role 'worker'" in refusal(hello("worker"), FRONT_ROLES)
    assert "role 'api'" in refusal(hello("api"), BACK_ROLES)
    assert "protocol 99" in refusal(Hello(role="api", name="x", protocol=PROTOCOL + 98), FRONT_ROLES)
