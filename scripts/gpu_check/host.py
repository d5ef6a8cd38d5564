"""Check of the host."""

from rl.doctor.host import check_host, this_host
from scripts.gpu_check.setting import Setting
from scripts.gpu_check.verdicts import Verdict


async def host(setting: Setting) -> Verdict:
    """Return the doctor's findings; its warnings do not fail."""
    facts = this_host()
    found = [*check_host(facts)]
    wrong = [f"{each.where}: {each.what}; {each.fix}" for each in found if each.severity == "error"]
    if setting.cuda and not facts.cuda:
        wrong.append("torch cannot use a GPU; run python -m rl.doctor")
    warnings = [f"{each.where}: {each.what}" for each in found if each.severity == "warning"]
    gpus = f"{facts.gpus} GPUs" if facts.cuda else "no GPU"
    driver = f", driver {facts.driver}" if facts.driver else ""
    return Verdict(
        wrong="; ".join(wrong),
        said="; ".join([f"{gpus}{driver}, {facts.cores} cores", *warnings]),
        numbers={"gpus": facts.gpus, "cores": facts.cores},
    )
