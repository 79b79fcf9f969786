"""What a training is going to communicate, told from its configuration files and the number of ranks: nothing runs."""

from __future__ import annotations

from .inputs import Options, Plan, PlanError, plan
from .tables import Forecast, forecast

__all__ = ["Forecast", "Options", "Plan", "PlanError", "forecast", "plan"]
