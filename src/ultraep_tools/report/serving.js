// The plots of a load test report.

const rateAxis = { ...title("prompts per second"), rangemode: "tozero" };

function lines(data, key, look = () => ({})) {
  return data.lines.map((entry, place) => {
    const colour = entry.variant === "even" ? "#3d9970" : policyColour(entry.variant, place);
    return line(data.rates, entry[key], entry.label, colour, {
      mode: "lines+markers", marker: { size: 7 }, line: { color: colour, dash: DASHED[entry.variant] || "solid" },
      ...look(entry, colour),
    });
  });
}

const DASHED = { even: "dash" };

const figures = {
  waits(data) {
    const tail = lines(data, "p90", (entry, colour) => ({
      name: `${entry.label}, p90`, showlegend: false, opacity: 0.55, marker: { size: 4 },
      line: { color: colour, dash: "dot", width: 1.5 }, hovertemplate: "%{y:.3f} s",
    }));
    const median = lines(data, "p50", () => ({ hovertemplate: "%{y:.3f} s" }));
    return [
      [...tail, ...median],
      {
        xaxis: rateAxis, yaxis: { ...title("seconds to first token"), type: "log" },
        shapes: [even("x domain", data.objective)],
      },
    ];
  },

  served(data) {
    const most = Math.max(...data.rates);
    const diagonal = {
      type: "line", x0: 0, y0: 0, x1: most, y1: most, line: { color: css("text"), width: 1, dash: "dash" },
    };
    return [lines(data, "served"), {
      xaxis: rateAxis, yaxis: { ...title("first tokens per second"), rangemode: "tozero" }, shapes: [diagonal],
    }];
  },

  intime(data) {
    const whole = { ...title("share within objective"), tickformat: ".0%", range: [0, 1.05] };
    return [lines(data, "share", () => ({ hovertemplate: "%{y:.1%}" })), { xaxis: rateAxis, yaxis: whole }];
  },

  loads(data) {
    const routed = lines(data, "before", (entry, colour) => ({
      name: `${entry.label}, as routed`, showlegend: false, opacity: 0.55,
      line: { color: colour, dash: "dot", width: 1.5 },
    }));
    return [[...routed, ...lines(data, "after")], {
      xaxis: rateAxis, yaxis: title("busiest rank / mean"), shapes: [even("x domain", 1)],
    }];
  },
};
removeEmptySections();
drawAll();
