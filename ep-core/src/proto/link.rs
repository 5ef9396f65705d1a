//! The arithmetic of a stream of a link between nodes. Messages are numbered from 0 and lie in slot
//! `seq mod window`, in the sender's staging and in the receiver's landing memory.
//!
//! | word | owner, reader | writer | store | reuse |
//! |---|---|---|---|---|
//! | `landed[slot]` | receiver | its proxy | release, after all writes of the message were noticed | only grows |
//! | `sent[slot]` | sender | its proxy | release, after all writes of the message completed | only grows |
//! | `credit` | sender | its proxy | release; the sum of the increments that came | only grows |
//!
//! Nothing has an order between nodes: writes, notices, completions and credits come in any. What makes a slot
//! free is therefore never that something came after something else, only that this very message was consumed.

/// How many messages of a stream may be on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window(u64);

impl Window {
    /// Of so many messages, at least 1.
    pub const fn new(messages: u64) -> Window {
        Window(messages)
    }

    /// The slot of a message.
    pub const fn slot_of(self, seq: u64) -> u64 {
        seq % self.0
    }

    /// What the word of the slot says before message `seq` is in it: the message a window earlier was, or nothing.
    const fn word_before(self, seq: u64) -> u64 {
        (seq + 1).saturating_sub(self.0)
    }

    /// True if the `sent` word proves that the staging slot of `seq` may be filled.
    pub const fn may_stage(self, sent: u64, seq: u64) -> bool {
        sent == self.word_before(seq)
    }

    /// True if the `landed` word admits that `seq` comes next in its slot; else it came twice, or without credit.
    pub const fn may_land(self, landed: u64, seq: u64) -> bool {
        landed == self.word_before(seq)
    }

    /// True if the receiver is done with what was in the landing slot of `seq`, where credit says so.
    pub const fn has_credit(self, credit: u64, seq: u64) -> bool {
        seq < credit + self.0
    }

    /// Messages that are worth a credit: a quarter of the window.
    pub const fn credit_step(self) -> u64 {
        if self.0 < 8 { 1 } else { self.0 / 4 }
    }

    /// The increment to send when every message before `consumed` was consumed and `given` of them are credited.
    /// None: it is not worth it yet. What stays ungiven is less than a step, so the window never closes.
    pub const fn credit_due(self, consumed: u64, given: u64) -> Option<u64> {
        let freed = consumed.saturating_sub(given);
        if freed >= self.credit_step() { Some(freed) } else { None }
    }

    /// The most credits that can be on their way to a sender at once.
    pub const fn credits_at_once(self) -> u64 {
        self.0.div_ceil(self.credit_step())
    }
}

/// True if the `landed` word says that `seq` is there.
pub const fn has_landed(landed: u64, seq: u64) -> bool {
    landed == seq + 1
}

/// The number with these low `bits` bits that is nearest to `near`: in `near - 2^(bits-1) .. near + 2^(bits-1)`.
/// None if that would be negative or too large.
///
/// A message that comes lies less than a window behind or before the frontier, the highest number that came plus
/// one, so `2^(bits-1)` must be at least the window.
pub const fn expand(low: u64, bits: u32, near: u64) -> Option<u64> {
    let modulus = 1u64 << bits;
    let ahead = low.wrapping_sub(near) & (modulus - 1);
    if ahead < modulus / 2 { near.checked_add(ahead) } else { near.checked_sub(modulus - ahead) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_takes_its_messages_one_after_the_other() {
        let window = Window::new(3);
        for seq in 0..20 {
            let before = if seq < 3 { 0 } else { seq - 3 + 1 };
            assert!(window.may_stage(before, seq) && window.may_land(before, seq));
            assert!(!window.may_stage(seq + 1, seq) && has_landed(seq + 1, seq));
            assert_eq!(window.slot_of(seq), window.slot_of(seq + 3));
        }
    }

    #[test]
    fn ungiven_credit_is_less_than_a_step_and_never_closes_the_window() {
        for messages in 1..=256 {
            let window = Window::new(messages);
            let (mut given, mut credits) = (0, 0);
            for consumed in 0..=messages {
                if let Some(freed) = window.credit_due(consumed, given) {
                    given += freed;
                    credits += 1;
                }
                assert!(consumed - given < window.credit_step());
                assert!(window.has_credit(given, consumed), "all consumed, so the next may be sent");
            }
            assert!(credits <= window.credits_at_once(), "{messages}");
        }
    }

    #[test]
    fn numbers_of_two_windows_around_the_frontier_are_told_apart() {
        for near in [0, 1, 255, 256, 511, 512, 1023, 1 << 20, (1 << 40) - 3, u64::MAX - 600] {
            for number in near.saturating_sub(256)..near + 256 {
                assert_eq!(expand(number & 511, 9, near), Some(number), "near {near}");
            }
        }
        assert_eq!(expand(511, 9, 3), None, "nothing lies before number 0");
        assert_eq!(expand(3, 9, u64::MAX), None);
    }
}
