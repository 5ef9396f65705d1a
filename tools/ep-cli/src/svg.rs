//! A line chart with logarithmic axes, as SVG.

use std::fmt::Write;

/// A line of the chart.
pub(crate) struct Series {
    /// In the legend.
    pub(crate) name: String,
    /// Both positive; by x.
    pub(crate) points: Vec<(f64, f64)>,
    /// Dashed: something to compare with.
    pub(crate) dashed: bool,
}

/// What is drawn.
pub(crate) struct Chart {
    /// Over the chart.
    pub(crate) title: String,
    /// Under the x axis.
    pub(crate) x: String,
    /// Beside the y axis.
    pub(crate) y: String,
    /// In the order of the legend.
    pub(crate) series: Vec<Series>,
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 270.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 56.0;
/// Told apart by people who see fewer colours, too.
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b4c9a", "#4d4d4d"];

/// One logarithmic axis.
struct Axis {
    /// Logarithms to base 10.
    least: f64,
    most: f64,
    /// Places on the page of both ends.
    from: f64,
    to: f64,
}

impl Axis {
    fn of(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Axis {
        let logs = values.filter(|value| *value > 0.0).map(f64::log10);
        let (least, most) =
            (logs.clone().fold(f64::INFINITY, f64::min), logs.fold(f64::NEG_INFINITY, f64::max));
        let (least, most) = if least <= most { (least, most) } else { (0.0, 1.0) };
        let margin = (0.05 * (most - least)).max(0.05);
        Axis { least: least - margin, most: most + margin, from, to }
    }

    fn place(&self, value: f64) -> f64 {
        self.from + (value.log10() - self.least) / (self.most - self.least) * (self.to - self.from)
    }

    /// 1, 2 and 5 times powers of ten; only the powers where those would be too many.
    fn ticks(&self) -> Vec<f64> {
        let decades = self.least.floor() as i32..=self.most.ceil() as i32;
        let steps: &[f64] = if self.most - self.least > 3.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let all = decades.flat_map(|decade| steps.iter().map(move |step| step * 10f64.powi(decade)));
        all.filter(|tick| (self.least..=self.most).contains(&tick.log10())).collect()
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A number without needless digits.
fn number(value: f64) -> String {
    match value {
        1e6.. => format!("{}M", value / 1e6),
        1e3.. => format!("{}k", value / 1e3),
        _ => format!("{value}"),
    }
}

impl Chart {
    /// The SVG document.
    pub(crate) fn render(&self) -> String {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let mut xs: Vec<f64> = points().map(|point| point.0).filter(|x| *x > 0.0).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        let x = Axis::of(xs.iter().copied(), LEFT, WIDTH - RIGHT);
        let y = Axis::of(points().map(|point| point.1), HEIGHT - BOTTOM, TOP);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
             height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
             <text x=\"{LEFT}\" y=\"26\" font-size=\"15\">{}</text>\n",
            escape(&self.title)
        );
        // The measured values themselves are the ticks of x, as long as they are few.
        let x_ticks = if xs.len() <= 12 { xs.clone() } else { x.ticks() };
        self.axes(&mut svg, &x, &y, &x_ticks);
        for (number, series) in self.series.iter().enumerate() {
            draw(&mut svg, series, number, &x, &y);
        }
        svg.push_str("</svg>\n");
        svg
    }

    fn axes(&self, svg: &mut String, x: &Axis, y: &Axis, x_ticks: &[f64]) {
        for &tick in x_ticks {
            let at = x.place(tick);
            line(svg, (at, y.from), (at, y.to), "#e4e4e4");
            text(svg, (at, y.from + 18.0), "middle", &tick.to_string());
        }
        for tick in y.ticks() {
            let at = y.place(tick);
            line(svg, (x.from, at), (x.to, at), "#e4e4e4");
            text(svg, (x.from - 8.0, at + 4.0), "end", &number(tick));
        }
        line(svg, (x.from, y.from), (x.to, y.from), "#222");
        line(svg, (x.from, y.from), (x.from, y.to), "#222");
        text(svg, ((x.from + x.to) / 2.0, HEIGHT - 16.0), "middle", &self.x);
        let middle = (y.from + y.to) / 2.0;
        let turned = format!("transform=\"rotate(-90 20 {middle:.1})\"");
        let name = escape(&self.y);
        let _ =
            writeln!(svg, "<text x=\"20\" y=\"{middle:.1}\" text-anchor=\"middle\" {turned}>{name}</text>");
    }
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), colour: &str) {
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn text(svg: &mut String, at: (f64, f64), anchor: &str, what: &str) {
    let what = escape(what);
    let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{what}</text>", at.0, at.1);
}

/// A series and its line of the legend.
fn draw(svg: &mut String, series: &Series, number: usize, x: &Axis, y: &Axis) {
    let colour = COLOURS[number % COLOURS.len()];
    let dash = if series.dashed { " stroke-dasharray=\"6 4\"" } else { "" };
    let positive = series.points.iter().filter(|point| point.0 > 0.0 && point.1 > 0.0);
    let places: Vec<(f64, f64)> = positive.map(|point| (x.place(point.0), y.place(point.1))).collect();
    let path: Vec<String> = places.iter().map(|place| format!("{:.1},{:.1}", place.0, place.1)).collect();
    let stroke = format!("fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}");
    let _ = writeln!(svg, "<polyline points=\"{}\" {stroke}/>", path.join(" "));
    for (at_x, at_y) in places {
        let _ = writeln!(svg, "<circle cx=\"{at_x:.1}\" cy=\"{at_y:.1}\" r=\"3.5\" fill=\"{colour}\"/>");
    }
    let (left, top) = (WIDTH - RIGHT + 20.0, TOP + 10.0 + 20.0 * number as f64);
    let _ = writeln!(svg, "<polyline points=\"{left},{top} {},{top}\" {stroke}/>", left + 26.0);
    text(svg, (left + 34.0, top + 4.0), "start", &series.name);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> String {
        let series = vec![Series { name: "a < b & c".into(), points, dashed: true }];
        Chart { title: "times".into(), x: "tokens".into(), y: "us".into(), series }.render()
    }

    #[test]
    fn a_chart_has_every_point_inside_its_frame() {
        let svg = chart(vec![(128.0, 90.0), (1024.0, 700.0), (4096.0, 2900.0)]);
        assert_eq!(svg.matches("<circle").count(), 3);
        for circle in svg.split("<circle cx=\"").skip(1) {
            let x: f64 = circle.split('"').next().and_then(|x| x.parse().ok()).unwrap();
            assert!((LEFT..=WIDTH - RIGHT).contains(&x));
        }
        assert!(svg.contains("a &lt; b &amp; c") && svg.contains(">4096<") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn one_point_or_none_is_a_chart_too() {
        for points in [vec![], vec![(64.0, 5.0)], vec![(0.0, 0.0)]] {
            let svg = chart(points);
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
