//! The contract's messages and stubs, generated from `protos/headrace/v1` by `scripts/generate-rust.sh`. The library's
//! own types suffice for most; these are for what they leave out, such as the whole [`ModelCard`].
#![allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, rustdoc::all)]

mod headrace {
    pub mod v1 {
        include!("headrace.v1.rs");
    }
}

pub mod google {
    //! The statuses of rejections and failures, and their details.
    pub mod rpc {
        //! The messages of `google/rpc`.
        include!("google.rpc.rs");
    }
}

pub use headrace::v1::*;
