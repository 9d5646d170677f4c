"""Looking at graphs and programs: the checker, data dumps, timelines."""
