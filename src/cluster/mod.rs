//! Access to the API server: client, election, watches, writes, reviews, events. Every call has a deadline.

pub mod backoff;
pub mod client;
pub mod election;
pub mod events;
pub mod eviction;
pub mod kubeconfig;
pub mod lease;
pub mod list;
pub mod load_signs;
pub mod mounted;
pub mod nodes;
pub mod requests;
pub mod reviews;
pub mod taint;
pub mod token_bucket;
pub mod typed;
mod unreachable;
pub mod watch;
