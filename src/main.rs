//! The binary: nothing but the call.

fn main() {}
