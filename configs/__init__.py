"""Configs that ship with Tiller: functions that return an RLConfig."""
