//! A scene: processes make a group and call in lockstep, one of them comes to harm at a chosen point, the
//! survivors report what they got, leave, and go on as a smaller group.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ep_core::Status;
use ep_core::config::{GroupConfig, Layout};
use ep_core::perturb::{Disturbance, Perturb};

use crate::process::{self, Rank, Scratch, say};
use crate::threads::config;
use crate::work::{Member, Place, Shape};

/// A call in which the victim comes to harm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Update,
    Dispatch,
    Combine,
}

impl Op {
    pub(crate) const ALL: [Op; 3] = [Op::Update, Op::Dispatch, Op::Combine];

    fn call(self, member: &mut Member) -> ep_core::Result<()> {
        match self {
            Op::Update => member.update(None),
            Op::Dispatch => member.dispatch(None),
            Op::Combine => member.combine(None),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene {
    pub(crate) num_ranks: usize,
    pub(crate) victim: usize,
    /// Enters `op` when the parent says so: until then the others wait inside.
    pub(crate) late: Option<usize>,
    /// None: calls follow each other without an end.
    pub(crate) op: Option<Op>,
    /// The victim waits for the parent before `op` rather than inside.
    pub(crate) before: bool,
    /// A child of the victim lives on for a while, with copies of its descriptors.
    pub(crate) forks: bool,
    /// The victim kills itself at this step; 0: never.
    pub(crate) die_at_step: u64,
    pub(crate) place: Place,
    pub(crate) layout: Layout,
    pub(crate) timeout: Duration,
}

impl Scene {
    pub(crate) fn new(place: Place, layout: Layout) -> Scene {
        Scene {
            num_ranks: 4,
            victim: 1,
            late: None,
            op: None,
            before: false,
            forks: false,
            die_at_step: 0,
            place,
            layout,
            timeout: Duration::from_secs(20),
        }
    }

    fn words(&self, rank: usize, scratch: &Scratch) -> String {
        let op = self.op.map_or(9, |op| op as usize);
        format!(
            "{rank} {} {} {} {op} {} {} {} {} {} {} {}",
            self.num_ranks,
            self.victim,
            self.late.unwrap_or(99),
            u8::from(self.before),
            u8::from(self.forks),
            self.die_at_step,
            self.place as usize,
            self.layout as i32,
            self.timeout.as_millis(),
            scratch.path().display()
        )
    }

    fn parse(words: &[String]) -> (usize, Scene, PathBuf) {
        let number = |at: usize| words[at].parse::<usize>().expect("the parent writes numbers");
        let scene = Scene {
            num_ranks: number(1),
            victim: number(2),
            late: Some(number(3)),
            op: Op::ALL.into_iter().find(|&op| op as usize == number(4)),
            before: number(5) == 1,
            forks: number(6) == 1,
            die_at_step: number(7) as u64,
            place: if number(8) == Place::Window as usize { Place::Window } else { Place::Ring },
            layout: Layout::from_code(number(9) as i32).expect("the parent writes codes"),
            timeout: Duration::from_millis(number(10) as u64),
        };
        (number(0), scene, PathBuf::from(&words[11]))
    }

    fn shape(&self, num_ranks: usize) -> Shape {
        Shape::large(num_ranks, self.layout, self.place)
    }

    fn config(&self) -> GroupConfig {
        config(self.timeout)
    }
}

/// What a survivor was told.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) when: Instant,
    #[expect(dead_code, reason = "printed with the rest")]
    rank: usize,
    pub(crate) status: Status,
    /// The rank that the group's error is about.
    pub(crate) peer: i32,
    /// How long its failed call took.
    pub(crate) waited: Duration,
    pub(crate) text: String,
}

/// The children of a scene.
pub(crate) struct Stage {
    pub(crate) scene: Scene,
    scratch: Scratch,
    /// By rank; None: ended.
    pub(crate) ranks: Vec<Option<Rank>>,
}

impl Stage {
    pub(crate) fn new(test: &str, scene: Scene) -> Stage {
        let scratch = Scratch::new();
        let spawn = |rank| Some(Rank::spawn(test, &scene.words(rank, &scratch), &scratch));
        let ranks = (0..scene.num_ranks).map(spawn).collect();
        Stage { scene, ranks, scratch }
    }

    pub(crate) fn rank(&mut self, rank: usize) -> &mut Rank {
        self.ranks[rank].as_mut().expect("the rank has not ended")
    }

    pub(crate) fn victim(&mut self) -> &mut Rank {
        self.rank(self.scene.victim)
    }

    /// Waits until every rank but a late one is inside the call in question.
    pub(crate) fn await_entered(&mut self) {
        for rank in 0..self.scene.num_ranks {
            self.rank(rank).await_line("entering");
        }
        // What follows is meant to happen inside the call; should it come too early, the scene is another
        // one with the same end.
        std::thread::sleep(Duration::from_millis(100));
    }

    pub(crate) fn survivors(&self) -> Vec<usize> {
        (0..self.scene.num_ranks).filter(|&rank| rank != self.scene.victim).collect()
    }

    pub(crate) fn reports(&mut self) -> Vec<Report> {
        self.survivors().into_iter().map(|rank| self.report(rank)).collect()
    }

    pub(crate) fn report(&mut self, rank: usize) -> Report {
        let (when, line) = self.rank(rank).await_line("error");
        let mut words = line.splitn(4, ' ');
        let mut next = || words.next().expect("four words");
        let status = Status::from_code(next().parse().expect("a code")).expect("a status");
        let peer = next().parse().expect("a rank or -1");
        let waited = Duration::from_millis(next().parse().expect("milliseconds"));
        Report { when, rank, status, peer, waited, text: next().to_string() }
    }

    /// The survivors leave, make a group of their own, and it works.
    pub(crate) fn go_on(&mut self) {
        let survivors = self.survivors();
        for (rank, &survivor) in survivors.iter().enumerate() {
            self.rank(survivor).tell(&format!("{rank} {}", survivors.len()));
        }
        for &survivor in &survivors {
            self.rank(survivor).await_line("again");
        }
    }

    /// The survivors end well.
    pub(crate) fn finish(mut self) {
        for survivor in self.survivors() {
            self.rank(survivor).tell("end");
        }
        for survivor in self.survivors() {
            self.ranks[survivor].take().expect("the rank has not ended").finish();
        }
        let left: Vec<_> = std::fs::read_dir(self.scratch.path()).expect("it is there").collect();
        assert!(left.is_empty(), "the ranks left {left:?}");
    }
}

/// Every survivor was told of the victim, as a call of its own or as what broke the group before.
pub(crate) fn check_reports(stage: &Stage, reports: &[Report], status: Status) {
    let victim = stage.scene.victim;
    for report in reports {
        let text = &report.text;
        assert!(report.status == status || report.status == Status::Aborted, "{report:?}, {:?}", stage.scene);
        assert_eq!(report.peer, victim as i32, "{report:?}, {:?}", stage.scene);
        assert!(text.contains(&format!("rank {victim}")), "{report:?}, {:?}", stage.scene);
        if report.status == Status::Aborted {
            assert!(text.contains("Why: "), "{report:?}, {:?}", stage.scene);
        }
    }
    assert!(reports.iter().any(|report| report.status == status), "{reports:?}, {:?}", stage.scene);
}

/// A child's part.
pub(crate) fn play(role: &[String]) {
    let (rank, scene, directory) = Scene::parse(role);
    let stop_at_step = if rank == scene.victim { scene.die_at_step } else { 0 };
    let what = Disturbance { seed: 0, delay_one_in: 0, delay_max: Duration::ZERO, stop_at_step };
    let path = directory.join("first");
    let group = process::meet(&path, rank, scene.num_ranks, &scene.config(), Perturb::new(what));
    let mut member = Member::new(&group, scene.shape(scene.num_ranks)).expect("windows are made");
    if rank == scene.victim && scene.forks {
        fork_sleeper();
    }
    if rank == scene.victim {
        // Ends the process while the call is in progress, if the parent says so.
        std::thread::spawn(move || {
            if !scene.before && process::hear() == "exit" {
                std::process::exit(0);
            }
        });
    }
    let (waited, error) = call_until_failure(&mut member, &scene, rank);
    if error.message.contains("stopped by its test") {
        say("dying");
        process::die();
    }
    let peer = group.health(&mut []).and_then(|info| info.peer).map_or(-1, |peer| peer as i32);
    let status = error.status.code();
    say(format!("error {status} {peer} {} {}", waited.as_millis(), error.message));
    if rank == scene.victim {
        return;
    }
    // The group stays broken, and every further call says so.
    let later = member.update(None).expect_err("the group is broken");
    assert_eq!(later.status, Status::Aborted, "{later}");
    go_on(&scene, &directory, (member, group));
}

/// A child that has copies of all descriptors of this process, and ends by itself.
fn fork_sleeper() {
    // SAFETY: the child makes async-signal-safe calls only, and returns into nothing.
    unsafe {
        if libc::fork() == 0 {
            libc::alarm(4);
            loop {
                libc::pause();
            }
        }
    }
}

fn call_until_failure(member: &mut Member, scene: &Scene, rank: usize) -> (Duration, ep_core::Error) {
    for seed in 0.. {
        member.prepare(seed);
        for op in Op::ALL {
            // Once: the call may work, where the victim comes to harm a little later than it was told.
            if scene.op == Some(op) && seed == 0 {
                say("entering");
                if scene.late == Some(rank) || (scene.before && scene.victim == rank) {
                    process::hear();
                }
            }
            let start = Instant::now();
            if let Err(error) = op.call(member) {
                return (start.elapsed(), error);
            }
        }
        if seed == 0 {
            say("round");
        }
    }
    unreachable!("rounds do not run out")
}

/// A survivor leaves the broken group and becomes a member of a new one.
fn go_on(scene: &Scene, directory: &std::path::Path, old: (Member, std::sync::Arc<ep_core::engine::Group>)) {
    let line = process::hear();
    let (rank, num_ranks) = line.split_once(' ').expect("two numbers");
    let (rank, num_ranks) = (rank.parse().expect("a rank"), num_ranks.parse().expect("a number"));
    old.1.close(Duration::from_secs(5)).expect("the group ends");
    drop(old);
    let path = directory.join("second");
    let config = GroupConfig { timeout_ms: 60_000, ..scene.config() };
    let group = process::meet(&path, rank, num_ranks, &config, Perturb::none());
    let mut member = Member::new(&group, scene.shape(num_ranks)).expect("windows are made");
    member.round(1).expect("the new group works");
    // A pattern that no value of the workload has; whoever writes into it is found out.
    member.rows().fill(-7.0);
    say("again");
    process::hear();
    assert!(member.rows().iter().all(|&element| element == -7.0), "someone wrote into the new window");
    member.round(2).expect("the new group works on");
    group.close(Duration::from_secs(5)).expect("the group ends");
}
