"""Corner cases of every loss: the questions, the judge, the worker processes and the matrix."""
