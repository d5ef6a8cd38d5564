"""Configs that ship with Tiller: functions that return a RLConfig."""
