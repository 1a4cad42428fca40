//! Reading the node: files in, an engine sample out.
