"""Ways to add up what the towers made."""
