//! Recorded samples and transitions, and their replay.
