//! The policy kinds of `ensurance.crane.io/v1alpha1`: schema, validation, compilation.
