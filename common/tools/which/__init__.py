"""Answers which loss to take from results that come with the suite, before anything is measured."""
