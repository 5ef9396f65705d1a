//! Where rank processes run: the nodes that they are of, the settings of their network, and what starts them.

use std::process::Command;

use anyhow::{Context, Result};

/// Nodes, and how a process is started on each.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    /// How many nodes.
    pub(crate) nodes: usize,
    /// Words before the program; `{rank}` and `{node}` in them are replaced.
    launcher: Vec<String>,
    variables: Vec<(String, String)>,
}

impl Placement {
    /// One node, on this machine.
    pub(crate) fn here() -> Placement {
        Placement { nodes: 1, launcher: Vec::new(), variables: Vec::new() }
    }

    /// `nodes` nodes, whose processes `launcher` starts.
    pub(crate) fn on(nodes: usize, launcher: Option<&str>) -> Placement {
        let launcher = launcher.unwrap_or("").split_whitespace().map(String::from).collect();
        Placement { nodes, launcher, ..Placement::here() }
    }

    /// The same with a variable of the environment.
    pub(crate) fn with(mut self, name: &str, value: &str) -> Placement {
        self.variables.push((name.to_string(), value.to_string()));
        self
    }

    /// Whether all processes are started by this one itself.
    pub(crate) fn is_local(&self) -> bool {
        self.launcher.is_empty()
    }

    /// The node of a rank: ranks of a node are neighbours, and as many on each as may be.
    pub(crate) fn node_of(&self, rank: usize, num_ranks: usize) -> usize {
        node_of(rank, num_ranks, self.nodes)
    }

    /// This program, to be run on `node`, where `rank` is what it is called there.
    ///
    /// # Errors
    /// If this program has no path.
    pub(crate) fn command(&self, rank: usize, node: usize) -> Result<Command> {
        let exe = std::env::current_exe().context("the path of this program")?;
        let filled =
            |word: &String| word.replace("{rank}", &rank.to_string()).replace("{node}", &node.to_string());
        let mut command = match self.launcher.split_first() {
            None => Command::new(exe),
            Some((program, words)) => {
                let mut command = Command::new(filled(program));
                command.args(words.iter().map(filled)).arg(exe);
                command
            }
        };
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        Ok(command)
    }
}

/// The node of `rank`, of `num_ranks` over `nodes`.
pub(crate) fn node_of(rank: usize, num_ranks: usize, nodes: usize) -> usize {
    rank * nodes / num_ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_has_ranks_and_they_are_neighbours() {
        for nodes in 1..6 {
            for ranks in nodes..20 {
                let of: Vec<usize> = (0..ranks).map(|rank| node_of(rank, ranks, nodes)).collect();
                assert!(of.is_sorted() && of.windows(2).all(|pair| pair[1] - pair[0] <= 1), "{of:?}");
                assert_eq!((of[0], of[ranks - 1]), (0, nodes - 1));
            }
        }
    }

    #[test]
    fn a_launcher_is_told_rank_and_node() -> Result<()> {
        let place = Placement::on(2, Some("nsenter --net=/run/h{node} -r{rank}")).with("A", "b");
        let command = place.command(3, 1)?;
        let words: Vec<String> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        assert_eq!(command.get_program(), "nsenter");
        assert_eq!(words[..2], ["--net=/run/h1", "-r3"]);
        assert_eq!(words.len(), 3);
        assert_eq!(command.get_envs().count(), 1);
        assert!(!place.is_local() && Placement::here().is_local());
        Ok(())
    }
}
