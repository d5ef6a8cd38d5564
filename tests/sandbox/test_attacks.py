"""No program gets out of the sandbox, as root or as an ordinary user."""

import pytest

from tests.kit.tables import check_rows, long
from tests.sandbox.attacks import ATTACKS, LIMITS, MESSES


@pytest.mark.parametrize(
    ("user", "sandbox"),
    [
        ("root", "bubblewrap"),
        ("ordinary", "Landlock"),
        long("ordinary", "bubblewrap"),
        long("root", "Landlock"),
    ],
)
def test_every_attack_is_contained_and_nothing_is_left(attacked, user, sandbox):
    report = attacked(user, sandbox)
    results = report["results"]

    def check(name: str) -> None:
        result = results[name]
        if name in ATTACKS:
            assert "ESCAPED" not in result["stdout"]
            assert (result["exit_code"], result["limit"]) == (1, None), result
        elif name in LIMITS:
            assert result["limit"] == LIMITS[name][2], result
        else:
            assert (result["exit_code"], result["stderr"]) == (0, ""), result

    check_rows([*ATTACKS, *LIMITS, *MESSES], check)
    assert (report["user"] == 0) == (user == "root")
    assert report["victims"] == len(ATTACKS)
    assert report["changed"] == []
    assert report["scratch"] == []
    assert report["processes"] == []


@pytest.mark.long
@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_attacks_succeed_without_a_sandbox(attacked, user):
    results = attacked(user, "unsafe")["results"]

    def check(name: str) -> None:
        if ATTACKS[name].shown == "root" and user == "ordinary":
            assert name not in results
        else:
            assert "ESCAPED" in results[name]["stdout"], results[name]

    check_rows([name for name, each in ATTACKS.items() if each.shown != "none"], check)
