"""Plans for one's own model: `from thinwire import plan`.

    measured = plan.profile(model, step)
    made = plan.Plan(measured, ["3lc[s=1.0]"], plan.Setting(link="50mbit", workers=8))
    print(*plan.verdict(made), sep="\\n")

`thinwire plan` does the same from a terminal.
"""

from __future__ import annotations

from thinwire.planner.planning import Plan
from thinwire.planner.predictions import Prediction, Setting, Summary
from thinwire.planner.profile import Profile, profile
from thinwire.planner.verdict import designs_table, picture, verdict, workers_table

__all__ = [
    "Plan",
    "Prediction",
    "Profile",
    "Setting",
    "Summary",
    "designs_table",
    "picture",
    "profile",
    "verdict",
    "workers_table",
]
