//! What a rank process does: joins the group, then serves commands until its input ends.

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use ep_core::bootstrap::{TcpBootstrap, UniqueId};
use ep_core::config::{GroupConfig, Transport};
use ep_core::engine::{Backend, Group};
use ep_core::{Error, Status};
use ep_fabric::FabricNetwork;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::bench::BenchRank;
use crate::bench::shape::Shape;
use crate::demo::{DemoJob, DemoRank};
use crate::launch::{Failure, Hello, Reply};
use crate::memory::Barrier;

/// What a rank process is for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Job {
    /// Measures calls as told.
    Bench(Shape),
    /// Runs recorded routings.
    Demo(DemoJob),
}

/// A rank that has met its peers.
pub(crate) struct Member {
    /// The group.
    pub(crate) group: Arc<Group>,
    /// Waits for all ranks.
    pub(crate) barrier: Barrier,
    /// Deadline of everything.
    pub(crate) timeout: Duration,
}

/// Serves until the input ends. A failure is told to the parent, and is the result.
///
/// # Errors
/// What the job failed with.
pub(crate) fn serve() -> Result<()> {
    // A parent that is killed takes its ranks along.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    ensure!(getppid().is_some_and(|parent| parent.as_raw_nonzero().get() != 1), "the parent has ended");
    let result = run();
    if let Err(error) = &result {
        let is_consequence = error.downcast_ref::<Error>().is_some_and(|error| {
            matches!(error.status, Status::Timeout | Status::PeerLost | Status::Aborted | Status::Bootstrap)
        });
        reply(&Reply::<()>::Failed(Failure { text: format!("{error:#}"), is_consequence }))?;
    }
    result
}

fn run() -> Result<()> {
    let hello: Hello<Job> = read()?.ok_or_else(|| anyhow!("no job on the standard input"))?;
    let timeout = Duration::from_millis(hello.timeout_ms.into());
    let member = Member {
        group: join(&hello, timeout)?,
        barrier: Barrier::open(&hello.barrier, hello.num_ranks)?,
        timeout,
    };
    let group = member.group.clone();
    match hello.job {
        Job::Bench(shape) => BenchRank::new(shape, member)?.serve()?,
        Job::Demo(job) => DemoRank::new(job, member)?.serve()?,
    }
    group.close(timeout).context("leaving the group")
}

fn join(hello: &Hello<Job>, timeout: Duration) -> Result<Arc<Group>> {
    let digits = hello.unique_id.as_bytes().chunks(2);
    let bytes: Option<Vec<u8>> =
        digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect();
    let bytes = bytes.filter(|bytes| bytes.len() == size_of::<UniqueId>());
    let id: UniqueId = bytemuck::pod_read_unaligned(&bytes.context("a malformed unique id")?);
    let deadline = Instant::now() + timeout;
    let bootstrap = TcpBootstrap::connect(&id, hello.rank, hello.num_ranks, deadline)?;
    let (experts, ring_bytes) = match &hello.job {
        Job::Bench(shape) => (shape.experts, shape.ring_bytes),
        Job::Demo(_) => (0, 0),
    };
    // The library's own default where that is enough.
    let per_rank = experts.div_ceil(hello.num_ranks);
    let config = GroupConfig {
        timeout_ms: hello.timeout_ms,
        max_local_experts: if per_rank > 256 { per_rank as u32 } else { 0 },
        ring_bytes,
        node_id: hello.node_id,
        ..GroupConfig::default()
    };
    if hello.node_id == 0 {
        return Ok(Group::create(&config, Box::new(bootstrap), deadline)?);
    }
    let backend = Backend::host("").with_network(FabricNetwork::of_process()?, "asked for");
    let config = GroupConfig { transport: Transport::Fabric as i32, ..config };
    Ok(Group::create_on(backend, &config, Box::new(bootstrap), deadline)?)
}

/// The next line of the input; None at its end.
///
/// # Errors
/// If it is not a line of JSON of this type.
pub(crate) fn read<T: DeserializeOwned>() -> Result<Option<T>> {
    let mut line = String::new();
    if std::io::stdin().lock().read_line(&mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(&line).with_context(|| format!("a command {line:?}"))?))
}

/// Writes one line to the parent.
///
/// # Errors
/// If the parent does not read any more.
pub(crate) fn reply<T: Serialize>(message: &Reply<T>) -> Result<()> {
    let mut line = serde_json::to_string(message)?;
    line.push('\n');
    let mut output = std::io::stdout().lock();
    output.write_all(line.as_bytes())?;
    Ok(output.flush()?)
}

#[cfg(test)]
pub(crate) mod tests {
    use ep_core::bootstrap::LocalBootstrap;

    use super::*;
    use crate::memory::BARRIER_BYTES;

    /// The only member of a group.
    pub(crate) fn alone() -> Result<Member> {
        let timeout = Duration::from_secs(10);
        let bootstrap = LocalBootstrap::group(1).pop().context("a group of one")?;
        let group = Group::create(&GroupConfig::default(), Box::new(bootstrap), Instant::now() + timeout)?;
        let file = tempfile::NamedTempFile::new()?;
        file.as_file().set_len(BARRIER_BYTES)?;
        Ok(Member { group, barrier: Barrier::open(file.path(), 1)?, timeout })
    }
}
