"""The ranks of a distributed job: whether they agree, the collective of a logged step, and merging."""
