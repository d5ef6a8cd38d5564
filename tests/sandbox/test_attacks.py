"""No program gets out of the sandbox, as root or as an ordinary user."""

import pytest

from tests.sandbox.attacks import ATTACKS, LIMITS, MESSES

USERS = ("root", "ordinary")
WALLS = ("bubblewrap", "Landlock")


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("sandbox", WALLS)
class TestSandbox:
    @pytest.mark.parametrize("name", ATTACKS)
    def test_attack_is_contained(self, attacked, user, sandbox, name):
        result = attacked(user, sandbox)["results"][name]
        assert "ESCAPED" not in result["stdout"]
        assert result["exit_code"] == 1, result
        assert result["limit"] is None, result

    @pytest.mark.parametrize("name", LIMITS)
    def test_limit_ends_the_program_and_is_named(self, attacked, user, sandbox, name):
        result = attacked(user, sandbox)["results"][name]
        assert result["limit"] == LIMITS[name][2], result

    @pytest.mark.parametrize("name", MESSES)
    def test_program_that_leaves_a_mess_ends_well(self, attacked, user, sandbox, name):
        result = attacked(user, sandbox)["results"][name]
        assert (result["exit_code"], result["stderr"]) == (0, "")

    def test_files_outside_are_as_they_were_and_nothing_is_left(self, attacked, user, sandbox):
        report = attacked(user, sandbox)
        assert (report["user"] == 0) == (user == "root")
        assert report["victims"] == len(ATTACKS)
        assert report["changed"] == []
        assert report["scratch"] == []
        assert report["processes"] == []


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", [name for name, each in ATTACKS.items() if each.shown != "none"])
def test_attack_succeeds_without_a_sandbox(attacked, user, name):
    results = attacked(user, "unsafe")["results"]
    if ATTACKS[name].shown == "root" and user == "ordinary":
        assert name not in results
    else:
        assert "ESCAPED" in results[name]["stdout"], results[name]
