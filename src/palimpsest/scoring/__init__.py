"""How well were the training images recovered, and does that prove that they leaked?"""

from palimpsest.scoring import matching, metrics
from palimpsest.scoring.scores import ImageScores, Score, score
from palimpsest.scoring.verdict import Outcome, Verdict, judge, strongest

__all__ = ["ImageScores", "Outcome", "Score", "Verdict", "judge", "matching", "metrics", "score", "strongest"]
