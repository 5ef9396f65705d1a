//! The transport over real libfabric: two versions, and on each the providers that a machine without special
//! hardware has. Every scene runs between two processes on addresses of the loopback interface.
//!
//! | module | duty |
//! | --- | --- |
//! | [`cell`] | which library and provider, and processes that use them |
//! | [`rank`] | one of the two processes: a NIC, memory, the other's address |
//! | [`scenes`] | what two ranks do |
//! | [`alone`] | what one process can see by itself |
//! | [`ports`] | ranks as threads, each with a proxy over two NICs |

mod alone;
mod cell;
mod ports;
mod rank;
mod scenes;
