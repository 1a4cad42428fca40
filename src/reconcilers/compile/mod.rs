//! Compiles policies for nodes. Pure.

pub mod catalog;
pub mod content;
pub mod index;
mod label_filter;
pub mod watermark;
