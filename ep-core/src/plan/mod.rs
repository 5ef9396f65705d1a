//! A routing as arithmetic: which row goes where, by counting and prefix sums alone.

mod count;
mod experts;
mod state;

pub use count::{Routing, count};
pub use experts::ExpertMap;
pub use state::{NO_ROW, PlanLayout, PlanShape, PlanState};
