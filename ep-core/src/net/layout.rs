//! Where everything of a port lies: slots in the registered region, words and rings in the control memory.

use super::command::COMMAND_BYTES;
use super::immediate::{MAX_LINKS, MAX_WINDOW};
use crate::error::{Error, Result, Status};
use crate::proto::Window;
use crate::wire::LINE_BYTES;

/// Lanes that a stream's number can name.
pub const MAX_LANES: usize = 16;
/// NICs of one process that a message may be cut over.
pub const MAX_NICS: usize = 8;

/// What a stream carries. A credit has no payload, and a stream for its own commands only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Descriptors of calls.
    Desc = 0,
    /// Rows of a dispatch.
    Rows = 1,
    /// Questions of a combine.
    Request = 2,
    /// Their answers.
    Response = 3,
    /// The error record, once; lane 0 only.
    Error = 4,
    /// Messages of (lane, Rows) freed by the receiver.
    Credit = 5,
    /// The test of a new connection; lane 0 only, and the proxy's own.
    Probe = 6,
}

impl Kind {
    /// The kinds that have slots, in the order in which they lie.
    pub const WITH_SLOTS: [Kind; 6] =
        [Kind::Desc, Kind::Rows, Kind::Request, Kind::Response, Kind::Error, Kind::Probe];
    /// The kinds that have a command ring: what callers send.
    pub const WITH_RING: [Kind; 6] =
        [Kind::Desc, Kind::Rows, Kind::Request, Kind::Response, Kind::Error, Kind::Credit];
    /// Room for kinds in a stream's number.
    pub(super) const RADIX: usize = 8;

    const fn from_code(code: u8) -> Option<Kind> {
        match code {
            0 => Some(Kind::Desc),
            1 => Some(Kind::Rows),
            2 => Some(Kind::Request),
            3 => Some(Kind::Response),
            4 => Some(Kind::Error),
            5 => Some(Kind::Credit),
            6 => Some(Kind::Probe),
            _ => None,
        }
    }
}

/// A stream: an own numbering of messages, with slots of its own, on every link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream {
    lane: u8,
    kind: Kind,
}

impl Stream {
    /// Numbers of streams.
    pub const COUNT: usize = MAX_LANES * Kind::RADIX;

    /// The stream of `kind` in `lane`, below [`MAX_LANES`].
    pub const fn new(lane: usize, kind: Kind) -> Stream {
        assert!(lane < MAX_LANES, "there are 16 lanes");
        Stream { lane: lane as u8, kind }
    }

    /// The lane.
    pub const fn lane(self) -> usize {
        self.lane as usize
    }

    /// What it carries.
    pub const fn kind(self) -> Kind {
        self.kind
    }

    /// The number of 7 bits in commands and immediates.
    pub const fn id(self) -> usize {
        self.lane as usize * Kind::RADIX + self.kind as usize
    }

    /// The stream with this number.
    pub const fn from_id(id: usize) -> Option<Stream> {
        if id >= Stream::COUNT {
            return None;
        }
        match Kind::from_code((id % Kind::RADIX) as u8) {
            Some(kind) => Some(Stream { lane: (id / Kind::RADIX) as u8, kind }),
            None => None,
        }
    }
}

/// How many slots a kind has per link and lane, and how large they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Messages that may be on their way at once, in `1..=`[`MAX_WINDOW`].
    pub window: u32,
    /// Bytes of the longest message.
    pub bytes: u32,
}

/// What a group wants of its network. The same on all its ranks, but for the links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Links of this rank.
    pub num_links: usize,
    /// Lanes, `1..=`[`MAX_LANES`].
    pub num_lanes: usize,
    /// Descriptors.
    pub desc: Slots,
    /// Chunks of rows.
    pub rows: Slots,
    /// Requests.
    pub request: Slots,
    /// Responses.
    pub response: Slots,
    /// Bytes of an error record.
    pub error_bytes: u32,
}

/// Slots begin at multiples of this, so that no two share a cache line.
const SLOT_ALIGN: u64 = 64;
const PAGE: u64 = 4096;
const LINE: u64 = LINE_BYTES as u64;
/// Bytes of a probe's slot.
pub(super) const PROBE_BYTES: u64 = 64;

/// One stream's place in a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// Slots; 0: the stream does not exist.
    pub(super) window: u32,
    /// Bytes that a message may have.
    pub(super) bytes: u32,
    /// Its number among the streams of a link.
    index: u32,
    /// Its first slot among the link's.
    first_slot: u32,
    /// Its first byte among the link's.
    offset: u64,
    /// Bytes from slot to slot.
    stride: u64,
}

/// Offsets of a port. Slots are numbered through all links: `slot` below is such a number.
///
/// ```text
/// region:  landing [link][lane][kind][slot] | staging, the same
/// control: landed words [slot] | sent words [slot] | credit words [link][lane] | failure words [link]
///          | per lane and kind: a line with `posted`, a ring of commands
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortLayout {
    shape: Shape,
    places: Box<[Place; Stream::COUNT]>,
    streams_per_link: u32,
    slots_per_link: u32,
    link_bytes: u64,
    /// Offset of each ring's line in the control memory, and its depth, by [`Stream::id`].
    rings: Box<[(u64, u32); Stream::COUNT]>,
    control_bytes: u64,
}

impl PortLayout {
    /// Lays out a port.
    ///
    /// # Errors
    /// [`Status::OutOfRange`] naming the number that is too small or too large.
    pub fn new(shape: Shape) -> Result<PortLayout> {
        check(&shape)?;
        let mut layout = PortLayout {
            shape,
            places: Box::new([Place::default(); Stream::COUNT]),
            streams_per_link: 0,
            slots_per_link: 0,
            link_bytes: 0,
            rings: Box::new([(0, 0); Stream::COUNT]),
            control_bytes: 0,
        };
        for lane in 0..shape.num_lanes {
            for kind in Kind::WITH_SLOTS {
                layout.add_slots(Stream::new(lane, kind));
            }
        }
        layout.link_bytes = layout.link_bytes.next_multiple_of(PAGE);
        layout.control_bytes = layout.failure_word(shape.num_links) as u64;
        for lane in 0..shape.num_lanes {
            for kind in Kind::WITH_RING {
                layout.add_ring(Stream::new(lane, kind));
            }
        }
        Ok(layout)
    }

    fn add_slots(&mut self, stream: Stream) {
        let shape = &self.shape;
        let slots = match stream.kind() {
            Kind::Desc => shape.desc,
            Kind::Rows => shape.rows,
            Kind::Request => shape.request,
            Kind::Response => shape.response,
            Kind::Error if stream.lane() == 0 => Slots { window: 1, bytes: shape.error_bytes },
            Kind::Probe if stream.lane() == 0 => Slots { window: MAX_NICS as u32, bytes: PROBE_BYTES as u32 },
            Kind::Error | Kind::Probe | Kind::Credit => return,
        };
        let stride = u64::from(slots.bytes).next_multiple_of(SLOT_ALIGN);
        self.places[stream.id()] = Place {
            window: slots.window,
            bytes: slots.bytes,
            index: self.streams_per_link,
            first_slot: self.slots_per_link,
            offset: self.link_bytes,
            stride,
        };
        self.streams_per_link += 1;
        self.slots_per_link += slots.window;
        self.link_bytes += u64::from(slots.window) * stride;
    }

    /// A ring has room for every command that its credits allow, so a push never waits: a message per slot, and
    /// a credit per message that can come.
    fn add_ring(&mut self, stream: Stream) {
        let window = match stream.kind() {
            Kind::Credit => self.places[Stream::new(stream.lane(), Kind::Rows).id()].window,
            _ => self.places[stream.id()].window,
        };
        if window == 0 {
            return;
        }
        let depth = (self.shape.num_links.max(1) * window as usize).next_power_of_two() as u32;
        self.control_bytes = self.control_bytes.next_multiple_of(LINE);
        self.rings[stream.id()] = (self.control_bytes, depth);
        self.control_bytes += LINE + u64::from(depth) * COMMAND_BYTES as u64;
    }

    /// What it was made for.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Bytes of the region that NICs register.
    pub fn region_bytes(&self) -> u64 {
        2 * self.landing_bytes()
    }

    /// Bytes of the words and rings.
    pub fn control_bytes(&self) -> u64 {
        self.control_bytes
    }

    /// Bytes of one link's landing area.
    pub(super) fn link_bytes(&self) -> u64 {
        self.link_bytes
    }

    fn landing_bytes(&self) -> u64 {
        self.shape.num_links as u64 * self.link_bytes
    }

    /// Slots of all links.
    pub(super) fn num_slots(&self) -> usize {
        self.shape.num_links * self.slots_per_link as usize
    }

    /// Streams with slots, of one link.
    pub(super) fn streams_per_link(&self) -> usize {
        self.streams_per_link as usize
    }

    /// The number of a stream with slots among those of a link.
    pub(super) fn stream_index(&self, stream: Stream) -> usize {
        self.places[stream.id()].index as usize
    }

    /// Completions of one link's messages and credits that may be there at once, on one NIC. Probes come before
    /// everything else, and there are fewer of them.
    pub(super) fn incoming_per_link(&self) -> usize {
        let messages = self.slots_per_link as usize - MAX_NICS;
        let credits = Window::new(self.shape.rows.window.into()).credits_at_once() as usize;
        messages + credits * self.shape.num_lanes
    }

    /// The most messages that the stream may have on its way: 0 if it does not exist.
    pub fn window(&self, stream: Stream) -> u64 {
        self.places[stream.id()].window.into()
    }

    /// The rules of the stream's slots.
    pub(super) fn rules(&self, stream: Stream) -> Window {
        Window::new(self.window(stream))
    }

    /// Bytes of the stream's longest message.
    pub fn max_bytes(&self, stream: Stream) -> u64 {
        self.places[stream.id()].bytes.into()
    }

    /// The slot of message `seq`; None if there is no such link or stream.
    #[inline]
    pub(super) fn slot(&self, link: usize, stream: Stream, seq: u64) -> Option<usize> {
        let place = &self.places[stream.id()];
        if place.window == 0 || link >= self.shape.num_links {
            return None;
        }
        let in_link = u64::from(place.first_slot) + seq % u64::from(place.window);
        Some(link * self.slots_per_link as usize + in_link as usize)
    }

    /// Where a link's landing area begins in the region: what its peer is told.
    pub(super) fn landing_base(&self, link: usize) -> u64 {
        link as u64 * self.link_bytes
    }

    /// Offset of message `seq` in a link's landing area, the same on both sides of a link.
    #[inline]
    pub(super) fn offset_in_link(&self, stream: Stream, seq: u64) -> u64 {
        let place = &self.places[stream.id()];
        place.offset + seq % u64::from(place.window.max(1)) * place.stride
    }

    /// Offset in the region of the slot that the peer of `link` writes message `seq` to.
    #[inline]
    pub fn landing(&self, link: usize, stream: Stream, seq: u64) -> u64 {
        self.landing_base(link) + self.offset_in_link(stream, seq)
    }

    /// Offset in the region of the slot from which message `seq` goes to the peer of `link`.
    #[inline]
    pub fn staging(&self, link: usize, stream: Stream, seq: u64) -> u64 {
        self.landing_bytes() + self.landing(link, stream, seq)
    }

    /// Offset in the control memory of a slot's word: 1 + the number of the message that landed there last.
    #[inline]
    pub(super) fn landed_word(&self, slot: usize) -> usize {
        8 * slot
    }

    /// Offset of a slot's word: 1 + the number of the message whose bytes are no longer needed here.
    #[inline]
    pub(super) fn sent_word(&self, slot: usize) -> usize {
        8 * (self.num_slots() + slot)
    }

    /// Offset of a link's word for a lane: messages of (lane, Rows) that the peer has freed.
    #[inline]
    pub(super) fn credit_word(&self, link: usize, lane: usize) -> usize {
        8 * (2 * self.num_slots() + link * self.shape.num_lanes + lane)
    }

    /// Offset of a link's word that is not 0 once the link has failed.
    pub(super) fn failure_word(&self, link: usize) -> usize {
        8 * (2 * self.num_slots() + self.shape.num_links * self.shape.num_lanes + link)
    }

    /// Offset of a ring's `posted` word, of its first command, and its depth; None if the stream has none.
    pub(super) fn ring(&self, stream: Stream) -> Option<(usize, usize, u32)> {
        let (line, depth) = self.rings[stream.id()];
        (depth != 0).then_some((line as usize, (line + LINE) as usize, depth))
    }

    /// A number that differs where two ranks' messages would not fit each other's slots.
    pub(super) fn fingerprint(&self) -> u64 {
        let shape = &self.shape;
        let kinds = [shape.desc, shape.rows, shape.request, shape.response];
        let numbers = kinds.iter().flat_map(|kind| [kind.window, kind.bytes]);
        // FNV-1a over 32-bit numbers.
        [shape.num_lanes as u32, shape.error_bytes]
            .into_iter()
            .chain(numbers)
            .fold(0xCBF2_9CE4_8422_2325, |hash: u64, number| {
                (hash ^ u64::from(number)).wrapping_mul(0x0100_0000_01B3)
            })
    }
}

fn check(shape: &Shape) -> Result<()> {
    let limit = |what: &str, value: usize, least: usize, most: usize| {
        if (least..=most).contains(&value) {
            return Ok(());
        }
        let text = format!("{what} is {value}, and must be {least} to {most}");
        Err(Error::new(Status::OutOfRange, text))
    };
    limit("the number of links between nodes", shape.num_links, 0, MAX_LINKS - 1)?;
    limit("the number of lanes", shape.num_lanes, 1, MAX_LANES)?;
    // Lengths travel in units of 16 bytes, in 24 bits.
    let longest = super::command::MAX_BYTES as usize;
    for (what, slots) in
        [("DESC", shape.desc), ("ROWS", shape.rows), ("REQUEST", shape.request), ("RESPONSE", shape.response)]
    {
        limit(&format!("the window of {what} messages"), slots.window as usize, 1, MAX_WINDOW as usize)?;
        limit(&format!("the bytes of {what} messages"), slots.bytes as usize, 1, longest)?;
    }
    limit("the bytes of ERROR messages", shape.error_bytes as usize, 1, longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(num_links: usize, num_lanes: usize) -> Shape {
        Shape {
            num_links,
            num_lanes,
            desc: Slots { window: 3, bytes: 1000 },
            rows: Slots { window: 8, bytes: 65536 },
            request: Slots { window: 4, bytes: 512 },
            response: Slots { window: 4, bytes: 100_000 },
            error_bytes: 288,
        }
    }

    /// Sorted areas of (begin, bytes) must not overlap and must end at or before `end`.
    fn assert_apart(mut areas: Vec<(u64, u64)>, end: u64) {
        areas.sort_unstable();
        for pair in areas.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?} overlap");
        }
        let last = areas.last().expect("there are areas");
        assert!(last.0 + last.1 <= end, "{last:?} leaves {end}");
    }

    #[test]
    fn streams_come_back_from_their_numbers() {
        let mut found = 0;
        for id in 0..256 {
            if let Some(stream) = Stream::from_id(id) {
                assert_eq!(stream.id(), id);
                found += 1;
            }
        }
        assert_eq!(found, MAX_LANES * 7);
    }

    #[test]
    fn slots_words_and_rings_do_not_overlap() {
        for (num_links, num_lanes) in [(1, 1), (3, 2), (7, 16), (255, 1)] {
            let layout = PortLayout::new(shape(num_links, num_lanes)).unwrap();
            let (mut region, mut control) = (Vec::new(), Vec::new());
            for id in 0..Stream::COUNT {
                let Some(stream) = Stream::from_id(id) else { continue };
                if let Some((posted, commands, depth)) = layout.ring(stream) {
                    control.push((posted as u64, 8));
                    control.push((commands as u64, u64::from(depth) * COMMAND_BYTES as u64));
                }
                for link in 0..num_links {
                    for seq in 0..layout.window(stream) {
                        let slot = layout.slot(link, stream, seq).unwrap();
                        assert_eq!(layout.slot(link, stream, seq + 5 * layout.window(stream)), Some(slot));
                        region.push((layout.landing(link, stream, seq), layout.max_bytes(stream)));
                        region.push((layout.staging(link, stream, seq), layout.max_bytes(stream)));
                        control.push((layout.landed_word(slot) as u64, 8));
                        control.push((layout.sent_word(slot) as u64, 8));
                    }
                }
            }
            for link in 0..num_links {
                control.push((layout.failure_word(link) as u64, 8));
                control.extend((0..num_lanes).map(|lane| (layout.credit_word(link, lane) as u64, 8)));
            }
            assert!(region.iter().all(|area| area.0.is_multiple_of(SLOT_ALIGN)));
            assert_apart(region, layout.region_bytes());
            assert_apart(control, layout.control_bytes());
        }
    }

    #[test]
    fn streams_that_do_not_exist_have_no_slot() {
        let layout = PortLayout::new(shape(2, 2)).unwrap();
        assert_eq!(layout.slot(0, Stream::new(1, Kind::Error), 0), None);
        assert_eq!(layout.slot(0, Stream::new(2, Kind::Rows), 0), None);
        assert_eq!(layout.slot(2, Stream::new(0, Kind::Rows), 0), None);
        assert_eq!(layout.slot(0, Stream::new(0, Kind::Credit), 0), None);
    }

    #[test]
    fn impossible_shapes_are_refused_with_the_number() {
        let text = |shape: Shape| PortLayout::new(shape).unwrap_err().message;
        assert!(text(Shape { num_links: 8192, ..shape(1, 1) }).contains("8192"));
        assert!(text(shape(1, 17)).contains("1 to 16"));
        let wide = Shape { rows: Slots { window: 257, bytes: 64 }, ..shape(1, 1) };
        assert!(text(wide).contains("ROWS messages is 257"));
        let empty = Shape { desc: Slots { window: 3, bytes: 0 }, ..shape(1, 1) };
        assert!(text(empty).contains("DESC"));
    }

    #[test]
    fn the_fingerprint_knows_sizes_and_not_links() {
        let print = |shape: Shape| PortLayout::new(shape).unwrap().fingerprint();
        assert_eq!(print(shape(1, 2)), print(shape(9, 2)));
        assert_ne!(print(shape(1, 2)), print(shape(1, 1)));
        let other = Shape { rows: Slots { window: 4, bytes: 65536 }, ..shape(1, 2) };
        assert_ne!(print(shape(1, 2)), print(other));
    }
}
