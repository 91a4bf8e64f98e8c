"""Communication hidden behind the GEMMs that it feeds or drains: schedules, and operators that follow them."""
